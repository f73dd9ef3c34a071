"""A program that reads blocks which the plan's own program left out, such as an encoder that is called by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import autotp
from autotp.driver.options import Options
from autotp.driver.pipeline import apply_plan, capture_model
from autotp.inputs import Inputs

WIDTH = 16


class Tower(nn.Module):
    """Equal blocks, of which the last is read on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor, every: bool = False) -> Tensor:
        for block in self.blocks if every else self.blocks[:2]:
            x = x + block(x)
        return x


def test_equal_blocks_that_lie_differently_are_decided_each_for_itself():
    model, x = Tower(), torch.randn(256, WIDTH)
    plan = autotp.plan(model, 2, example_inputs=x, pins={"blocks.2.0.weight": Replicate()})
    captured, _ = capture_model(model, Inputs(x, every=True), torch.device("cpu"), False)
    first, last = (plan.placements[f"blocks.{i}.0.weight"] for i in (0, 2))
    assert first.sharded_dim is not None and last.sharded_dim is None
    planned, _ = apply_plan(captured, plan, Options.read(2))
    assert len(planned.decisions) > 0
