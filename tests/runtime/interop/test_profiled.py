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
from autotp.errors import InputError
from tests.helpers.compare import mesh_of
from tests.helpers.processes.pool import Pool

LATE = 0.3  # seconds
FORWARD, BACKWARD = "forward layers.*", "backward layers.*"


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


class Late(torch.autograd.Function):
    """The identity, in which a rank other than the first sleeps in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        time.sleep(LATE * rank)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(LATE * ctx.rank)
        return grads[0], None


def profiling(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(8, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), check_capture=False)
    sharded(x).square().sum().backward()

    def state() -> Any:
        grads = {n: p.grad for n, p in sharded.named_parameters()}
        norm = sharded.layers[0].norm
        return grads, [norm.running_mean, norm.num_batches_tracked], torch.get_rng_state()

    before = state()
    handle = sharded.layers[1].up.register_forward_pre_hook(lambda _, args: (Late.apply(args[0], rank),))
    profile = sharded.profile(x)
    handle.remove()
    after = state()
    same = before[0].keys() == after[0].keys() and all(before[0][n] is after[0][n] for n in after[0])
    same &= all(a is b for a, b in zip(before[1], after[1], strict=True)) and bool((before[2] == after[2]).all())
    profile.trace.export_chrome_trace(f"{folder}/trace{rank}.json")
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in sharded.modules())
    return {
        "text": str(profile), "rows": profile.rows, "predicted": profile.predicted, "same": same, "hooks": hooks
    }  # fmt: skip


def test_blocks_and_collectives_are_timed_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    both = pool.run(profiling, str(tmp_path), world=2)
    assert both[0]["text"] == both[1]["text"]  # every rank knows all of it
    found = both[0]
    assert found["same"] and both[1]["same"] and found["hooks"] == 0
    rows, predicted = found["rows"], found["predicted"]
    assert set(rows) == {"step", FORWARD, BACKWARD, "all_reduce"} and set(predicted) == set(rows) - {"all_reduce"}
    assert all(len(ranks) == 2 and min(ranks) > 0 for ranks in rows.values()) and min(predicted.values()) > 0
    # One sleeps in each direction and the other waits for it, in a block and in its collective.
    assert min(rows["step"]) > 2 * LATE and min(rows[FORWARD]) > LATE and min(rows[BACKWARD]) > LATE
    assert rows["all_reduce"][0] > 0.9 * 2 * LATE > LATE > rows["all_reduce"][1]
    assert max(rows[FORWARD]) + max(rows[BACKWARD]) < 1.1 * max(rows["step"])
    for words in ("predicted", "slowest", FORWARD, BACKWARD, "all_reduce", "(rank 0)"):
        assert words in found["text"]
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = [e["name"] for e in events if e.get("name", "").startswith("autotp ")]
        assert {f"autotp {way} layers.{i}" for i in range(2) for way in ("forward", "backward")} <= set(names)


def test_what_repeats_nothing_and_wrong_arguments() -> None:
    sharded: Any = autotp.compile(nn.Linear(8, 8), tp=1, example_inputs=torch.randn(2, 8), check_capture=False)
    profile = sharded.eval().profile(torch.randn(2, 8))
    assert profile.rows.keys() == {"step"} and profile.rows["step"][0] > 0
    assert profile.predicted == {}  # the plan is for training
    with pytest.raises(InputError, match="forward"):
        sharded.profile({"unknown": torch.randn(2, 8)})
    with torch.no_grad(), pytest.raises(InputError, match=r"has a gradient.*eval\(\)"):
        sharded.train().profile(torch.randn(2, 8))
