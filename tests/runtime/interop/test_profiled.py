"""`sharded.profile` times blocks and collectives on all ranks beside the plan, shows a late rank, changes nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import AutoTPError, InputError
from tests.helpers.compare import mesh_of
from tests.helpers.processes.pool import Pool

LATE = 0.3  # seconds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def profiling(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(8, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), check_capture=False)
    sharded(x).square().sum().backward()
    before = (
        {n: p.grad for n, p in sharded.named_parameters()},
        sharded.layers[0].norm.running_mean,
        torch.get_rng_state(),
    )
    sharded.layers[1].up.register_forward_pre_hook(lambda *_: time.sleep(LATE * rank))
    profile = sharded.profile(x, loss=lambda y: y.square().sum(), repeats=2)
    after = (
        {n: p.grad for n, p in sharded.named_parameters()},
        sharded.layers[0].norm.running_mean,
        torch.get_rng_state(),
    )
    profile.to_trace(f"{folder}/trace{rank}.json")
    found: dict[str, Any] = {"text": str(profile), "profile": [profile.step, profile.outside]}
    found["blocks"], found["collectives"] = profile.blocks, profile.collectives
    found["same"] = before[0].keys() == after[0].keys() and all(before[0][n] is after[0][n] for n in after[0])
    found["same"] &= before[1] is after[1] and bool((before[2] == after[2]).all())
    with pytest.raises(AutoTPError) as refused:
        sharded.profile(x, loss=lambda y: y)
    found["loss"] = str(refused.value)
    return found


def test_blocks_and_collectives_are_timed_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    both = pool.run(profiling, str(tmp_path), world=2)
    assert both[0]["text"] == both[1]["text"]  # every rank knows all of it
    found = both[0]
    assert found["same"] and both[1]["same"] and "one element" in found["loss"]
    assert "one element" in both[1]["loss"]
    step, outside = found["profile"]
    blocks = {(row.name, row.direction): row for row in found["blocks"]}
    first, second = "layers.0", "layers.1"
    assert list(blocks) == [(first, "forward"), (second, "forward"), (second, "backward"), (first, "backward")]
    assert all(len(row.ranks) == 2 and min(row.ranks) > 0 and row.predicted > 0 for row in blocks.values())
    assert step.seconds > LATE > outside.seconds and step.predicted > 0 and outside.predicted is not None
    late, other = blocks[second, "forward"], blocks[first, "forward"]
    assert min(late.ranks) > LATE > max(other.ranks)  # one sleeps, the other waits for it
    sums = [row for row in found["collectives"] if row.direction == "forward" and row.name.startswith(second)]
    assert [row.name for row in sums] == ["layers.1.all_reduce 1"]
    assert sums[0].predicted > 0 and sums[0].slowest == 0  # the rank that waits
    assert sums[0].ranks[0] > 0.9 * LATE > 2 * sums[0].ranks[1]
    for words in ("predicted", "measured", "slowest rank", "layers.0 forward", "layers.1.all_reduce 1 forward"):
        assert words in found["text"]
    events = json.loads((tmp_path / "trace1.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0, measured", "rank 1, measured"} < names and len(names) == 3
    waits = {e["pid"]: e["dur"] for e in events if e["name"] == "all-reduce forward" and e["ts"] > 0 and e["dur"] > 2e5}
    assert list(waits) == [1]  # microseconds of rank 0


def test_what_repeats_nothing_and_wrong_arguments() -> None:
    sharded: Any = autotp.compile(nn.Linear(8, 8), tp=1, example_inputs=torch.randn(2, 8), check_capture=False)
    profile = sharded.eval().profile(torch.randn(2, 8), repeats=1)
    assert profile.outside is None and profile.blocks == profile.collectives == ()
    assert profile.step.predicted is None and profile.step.seconds > 0  # the plan is for training
    with pytest.raises(InputError, match="repeats=0"):
        sharded.profile(torch.randn(2, 8), repeats=0)
    with pytest.raises(InputError, match="forward"):
        sharded.profile({"unknown": torch.randn(2, 8)})
