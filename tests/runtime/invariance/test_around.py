"""Around a module of equal bits: data parallelism, machines and kernels that would give others are seen."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autotp
from autotp import compat
from autotp.errors import RankError, StateError
from tests.helpers.compare import mesh_of

from .runs import Dropped

X = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(2))


def wrapped(rank: int, world: int, group: Any, tp: int) -> None:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))

    def made() -> Any:
        return autotp.compile(Dropped(), mesh=mesh, example_inputs=X, tp_invariant=4, check_capture=False)

    for wrap, part in ((fully_shard, "up"), (fully_shard, ""), (compat.replicate, "")):
        with pytest.raises(StateError, match="as by torch's fully_shard or replicate, which sum gradients in an order"):
            wrap(made().get_submodule(part), mesh=mesh["dp"])
    with pytest.raises(StateError, match="as by torch's fully_shard"):
        fully_shard(nn.Sequential(made()), mesh=mesh["dp"])
    with pytest.raises(StateError, match="DistributedDataParallel averages gradients"):
        DistributedDataParallel(made())


@pytest.mark.parametrize("tp", [1, 2])
def test_data_parallelism_of_torchs_is_refused_as_it_is_put_around(pool, tp: int):
    pool.run(wrapped, tp, world=4)


def unlike(rank: int, world: int, group: Any) -> None:
    for change, back, name in (
        (lambda: torch.set_num_threads(1 + rank), lambda: torch.set_num_threads(1), "threads: "),
        (
            lambda: torch.set_float32_matmul_precision(("highest", "high")[rank]),
            lambda: torch.set_float32_matmul_precision("highest"),
            "precision of products: ",
        ),
        (
            lambda: torch.use_deterministic_algorithms(rank == 0),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic algorithms: ",
        ),
        (
            lambda: os.environ.update(ONEDNN_MAX_CPU_ISA=("AVX2", "DEFAULT")[rank]),
            lambda: os.environ.pop("ONEDNN_MAX_CPU_ISA"),
            "ONEDNN_MAX_CPU_ISA: ",
        ),
    ):
        change()
        try:
            with pytest.raises(RankError, match=name):
                autotp.compile(Dropped(), mesh=mesh_of(group), example_inputs=X, tp_invariant=4, check_capture=False)
        finally:
            back()


def test_threads_and_kinds_of_machine_are_compared(pool):
    pool.run(unlike, world=2)


class Picks(nn.Module):
    """Rows by indices, whose gradients threads of a CPU add up in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.up(x)[rows]


def test_kernels_whose_order_is_open_run_in_torchs_deterministic_mode(monkeypatch: pytest.MonkeyPatch):
    rows = torch.tensor([0, 2, 2, 1])
    module = autotp.compile(Picks(), example_inputs=(X, rows), tp_invariant=4, check_capture=False)
    modes: list[bool] = []
    switch = torch.use_deterministic_algorithms
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, **options: (modes.append(on), switch(on, **options))
    )
    y = module(X, rows)
    forward, modes[:] = [*modes], []
    y.sum().backward()
    assert forward and forward == [True, False] * (len(forward) // 2) and modes == forward
    assert not torch.are_deterministic_algorithms_enabled()
