"""Gradients of bfloat16 parameters are added up in float32: over tp, over dp, and over backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.comm.conversions import f
from autotp.errors import InputError
from autotp.ir.specs import INVARIANT, REPLICATED
from tests.helpers.compare import mesh_of


class Reduced(TorchDispatchMode):
    """The types in which collectives add up."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in func._schema.name and "c10d" in func.namespace:
            found = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.types.add(found.dtype)
        return func(*args, **(kwargs or {}))


class Normed(nn.Module):
    """A norm before a product: over the sequence each rank has a summand of the norm's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def gradients(model: nn.Module, more: int = 1) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Of so many backwards, and the types in which they were reduced."""
    with Reduced() as reduced:
        for i in range(more):
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(i)).bfloat16()
            model(x).float().pow(2).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, reduced.types


def local(x: Any) -> Tensor:
    """The rank's part of a DTensor."""
    return x.to_local()


def on_ranks(rank: int, world: int, group: Any) -> None:
    # 256 + 1 is 256 in bfloat16, so that a sum of four numbers shows in what it is added up.
    for reduces, total in ((None, 256.0), (torch.float32, 260.0)):
        x = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
        y = f(x, INVARIANT, REPLICATED, rank=rank, tp=world, group=group.group_name, reduces=reduces)
        (y * (256 if rank == 0 else 1 + (rank == 3) * 0.5)).backward()
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
        assert (x.grad.item() == total) == (reduces is not None), x.grad
    example, options = torch.zeros(2, 8, 16, dtype=torch.bfloat16), {"mesh": mesh_of(group), "sequence_parallel": True}
    own = autotp.compile(Normed().bfloat16(), example_inputs=example, **options)
    wide = autotp.compile(Normed().bfloat16(), example_inputs=example, reduce_dtype="float32", **options)
    singles, types = gradients(own)
    assert torch.bfloat16 in types
    first, types = gradients(wide)
    assert "norm.weight" in first and all(g.dtype == torch.float32 for g in first.values())
    assert torch.float32 in types
    steps = []
    assert all(g.dtype == torch.bfloat16 for g in singles.values())
    for i in range(3):  # one after the other, and together
        wide.zero_grad()
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(i)).bfloat16()
        wide(x).float().pow(2).sum().backward()
        steps.append({n: local(p.grad).clone() for n, p in wide.named_parameters()})
    wide.zero_grad()
    together, _ = gradients(wide, 3)
    for n, g in together.items():
        assert torch.equal(local(g), steps[0][n] + steps[1][n] + steps[2][n]), n


def test_gradients_are_reduced_and_accumulated_in_float32(pool):
    pool.run(on_ranks, world=4)


def over_dp(rank: int, world: int, group: Any) -> None:
    example = torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    for fully_shard in (False, True):
        for reduces, kinds in ((None, {torch.bfloat16}), (torch.float32, {torch.float32})):
            options = {"dp": 2, "fully_shard": fully_shard, "reduce_dtype": reduces, "mesh": mesh}
            model = autotp.compile(Normed().bfloat16(), example_inputs=example, **options)
            found, types = gradients(model)
            assert found and kinds <= types, (fully_shard, reduces, types)


def test_over_dp_too(pool):
    pool.run(over_dp, world=4)


def test_what_is_no_such_type_is_refused():
    with pytest.raises(InputError, match="reduce_dtype='bfloat16'"):
        autotp.compile(Normed(), 1, example_inputs=torch.zeros(2, 8, 16), reduce_dtype="bfloat16")
