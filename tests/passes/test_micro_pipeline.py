"""Inductor's micro-pipeline: g and g* take the form that it fuses, and what it fused is counted.

Its fused operators are for GPUs. Here torch's own fall-backs (a collective, then matmuls) stand for them on the CPU, so
that the passes, the counts and the numbers are real, and nothing is said of speed.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as memory

import autotp
from autotp import compat
from autotp.comm import sockets, symmetric
from autotp.ir.program import MeshPlace
from autotp.passes.optimise import RankProgram, Setting
from autotp.passes.optimise.symmetric_memory import MicroPipeline, OneShot
from tests.helpers.compare import difference, gradients_differ, mesh_of


class Feed(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)]) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in self.blocks:  # type: ignore[misc]
            x = x + down(torch.tanh(up(norm(x))))
        return x


def stand_ins(stack: ExitStack) -> None:
    """Until the stack is left, torch takes the group for one with symmetric memory, on the CPU."""
    fallbacks = {name: getattr(memory, f"_{name}_fallback") for name in symmetric.FUSED}
    library = stack.enter_context(torch.library._scoped_library("symm_mem", "IMPL"))
    for name, fallback in fallbacks.items():
        library.impl(name, fallback, "CPU")
    stack.enter_context(memory._test_mode())
    stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
    stack.enter_context(patch.object(compat, "use_symmetric_memory", lambda group: None))


def fusing(rank: int, world: int, group: Any, length: int, on: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Feed(), torch.randn(2, length, 16)
    switches = {"micro_pipeline": on, "overlap": False}
    with ExitStack() as stack:
        stand_ins(stack)
        sharded: Any = autotp.compile(
            model, example_inputs=x, mesh=mesh_of(group), backend="inductor", sequence_parallel=True, optimise=switches
        )
        before = [line for line in sharded.plan.fired if line.startswith("micro")]
        for m in (model, sharded):
            m(x).square().mean().backward()
        found = {"outputs": difference(sharded(x), model(x)), "gradients": gradients_differ(sharded, model)}
    return {**found, "before": before, "after": [line for line in sharded.plan.fired if line.startswith("micro")]}


def test_inductor_fuses_what_the_plan_converts(pool):
    for found in pool.run(fusing, 8, True, world=2):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-5, found
        assert found["before"] == ["micro_pipeline: 2 conversions are ready for it; nothing is compiled yet"]
        # g and the product after it, the product and g* after it, and their backwards.
        [told] = found["after"]
        assert "fused_all_gather_matmul" in told and "0 fused_matmul_reduce_scatter" not in told, told


def test_uneven_splits_and_a_switch_that_is_off_fuse_nothing(pool):
    for found in pool.run(fusing, 7, True, world=2):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-5, found
        assert found["after"][0].startswith("micro_pipeline: switched on, and it fused nothing of 2 conversions"), found
    for found in pool.run(fusing, 8, False, world=2):
        assert found["after"] == ["micro_pipeline: switched off"] and found["gradients"] < 1e-5, found


def test_where_ranks_share_memory_it_is_on_only_where_somebody_measures_it():
    def idle(of: Any, judges: Any, tp: int = 2, backend: str = "inductor") -> str:
        given: Any = (MeshPlace(0, tp, ""), None, None, torch.device("cuda"), backend)
        return of.idle(RankProgram(torch.fx.Graph(), Setting(*given, judges=judges)))

    for of in (MicroPipeline(), OneShot()):
        with patch.object(sockets, "unavailable", lambda device, tp: ""):
            assert idle(of, {}) == f"nowhere: not measured (optimise={{'{of.name}': True}})"
            assert idle(of, {of.name: None}) == ""
        with patch.object(sockets, "unavailable", lambda device, tp: "the tp ranks span nodes"):
            assert idle(of, {of.name: None}) == "nowhere: the tp ranks span nodes"
    assert idle(OneShot(), {}, tp=1) == "nowhere: nothing is sent in one process"
    assert idle(MicroPipeline(), {}, backend="eager") == "nowhere: it is a pass of backend='inductor'"


def test_it_says_why_it_is_idle():
    model, x = Feed(), torch.randn(2, 8, 16)
    lines = autotp.compile(model, 1, example_inputs=x).plan.fired
    assert "micro_pipeline: nowhere: it is a pass of backend='inductor'" in lines
    lines = autotp.compile(model, 1, example_inputs=x, backend="inductor").plan.fired
    assert any("CUDA devices linked by NVLink, and this is cpu" in line for line in lines)
