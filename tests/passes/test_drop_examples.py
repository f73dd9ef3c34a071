"""Operands of which only dtype and device are read do not have to be brought together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.driver.compile import capture_model
from autotp.inputs import Inputs
from autotp.passes.canonicalise import canonicalise


class Examples(nn.Module):
    """Makes values like one that is split."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        made = y.new_zeros(y.shape) + y.new_ones(1) + y.new_full((y.shape[-1],), 0.5) + 0 * y.new_empty(1).zero_()
        made = made + y.new_ones(y.shape[-1]).expand_as(y) + y.new_zeros(y.numel()).view_as(y)
        return self.down(y + made) + x.sum().type_as(y)


def targets(model: nn.Module, x: Tensor) -> dict[str, Any]:
    captured, _ = capture_model(model, Inputs(x), torch.device("cpu"))
    return {str(n.target): n.meta["val"] for n in captured.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_examples_become_literals(dtype):
    x = torch.randn(4, 6, 16, dtype=dtype)
    found = targets(Examples().to(dtype), x)
    assert not [t for t in found if "new_" in t or "_as" in t]
    made = {t: found[t].dtype for t in ("aten.zeros.default", "aten.ones.default", "aten.full.default")}
    assert set(made.values()) == {dtype}


def test_nothing_is_gathered_for_an_example(monkeypatch):
    model, x = Examples(), torch.randn(4, 6, 16)
    report = autotp.verify(model, 2, x)
    assert report and report.plan is not None
    assert [c.forward for c in report.plan.collectives if c.forward] == ["all_reduce"]
    kept = tuple(p for p in canonicalise.CANONICAL if p.name != "drop-examples")
    monkeypatch.setattr("autotp.driver.schedule.CANONICAL", kept)
    before = autotp.plan(model, 2, example_inputs=x)
    assert before.totals.forward_bytes > report.plan.totals.forward_bytes
