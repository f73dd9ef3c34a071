"""Layers of torch that other libraries build on: what a rank holds of them, and that it computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.rules.core import RULES

IDS = torch.randint(0, 64, (8, 5), generator=torch.Generator().manual_seed(0))
X = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
aten: Any = torch.ops.aten


class Layers(nn.Module):
    """Layers, and what is done with them."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.layers)


def stepped(x: Tensor, cell: nn.Module) -> Tensor:
    """A recurrent cell over the steps of x."""
    state: Any = None
    for step in x.unbind(1):
        state = cell(step, state)
    return state[0] if isinstance(state, tuple) else state


def standardised(x: Tensor, up: nn.Conv2d, down: nn.Conv2d) -> Tensor:
    """Convolutions whose weights have mean 0 and variance 1 for each channel."""
    for conv in (up, down):
        weight = F.batch_norm(conv.weight.flatten(1)[None], None, None, training=True).view_as(conv.weight)
        x = F.conv2d(x, weight, conv.bias).relu()
    return x


def modulated(x: Tensor, gains: nn.Module, up: nn.Conv2d) -> Tensor:
    """A convolution whose kernel is scaled for each example: one group for each of them."""
    kernels = up.weight * gains(x.mean((2, 3)))[:, None, :, None, None]
    return F.conv2d(x.reshape(1, -1, 9, 9), kernels.flatten(0, 1), groups=len(x)).view(len(x), 64, 7, 7)


def bags(mode: str) -> nn.Module:
    return Layers(lambda x, bag, up: up(bag(x)), bag=nn.EmbeddingBag(64, 32, mode=mode), up=nn.Linear(32, 8))


PLANS = {
    "a sum of rows": (lambda: bags("sum"), IDS, aten.embedding_bag.padding_idx, 0.51),
    "a mean of rows": (lambda: bags("mean"), IDS, aten.embedding_bag.padding_idx, 0.51),
    "a cell of an LSTM": (lambda: Layers(stepped, cell=nn.LSTMCell(16, 32)), X, aten.lstm_cell.default, 0.51),
    "a cell of a GRU": (lambda: Layers(stepped, cell=nn.GRUCell(16, 32)), X, aten.gru_cell.default, 0.51),
    "weights with statistics": (
        lambda: Layers(standardised, up=nn.Conv2d(4, 64, 3), down=nn.Conv2d(64, 8, 3)),
        IMAGE, aten.batch_norm.default, 0.52,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANS)
def test_a_rank_holds_its_part(what, monkeypatch):
    torch.manual_seed(0)
    make, example, target, most = PLANS[what]
    model = make()
    report = autotp.verify(model, 2, example)
    assert report, report
    totals = autotp.plan(model, 2, example_inputs=example).totals
    assert totals.local_parameters <= most * totals.parameters
    monkeypatch.delitem(RULES, target)
    totals = autotp.plan(model, 2, example_inputs=example).totals
    assert totals.local_parameters > 0.6 * totals.parameters, "the negative control"


def test_groups_are_as_many_as_examples():
    torch.manual_seed(0)
    model = Layers(modulated, gains=nn.Linear(4, 4), up=nn.Conv2d(4, 64, 3))
    slow = dataclasses.replace(autotp.Cluster.preset("h100"), name="slow", peak_flops={"float32": 1e7})
    plan = autotp.plan(model, 2, example_inputs=IMAGE, cluster=slow)
    assert plan.totals.local_flops <= 0.6 * plan.totals.flops
    assert autotp.verify(model, 2, IMAGE, plan=plan)


def test_batch_norms_in_training_split_with_their_channels_and_write_their_statistics(monkeypatch):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(64)  # twice, so that the second reads what the first has written
    model = nn.Sequential(nn.Conv2d(4, 64, 3), norm, nn.ReLU(), nn.Conv2d(64, 64, 1), norm, nn.Conv2d(64, 8, 1))
    report = autotp.verify(model, 2, IMAGE)
    assert report and report.plan is not None and report.capture_error == 0
    sent = report.plan.totals.sent
    monkeypatch.delitem(RULES, torch.ops.autotp.batch_norm.default)
    plan = autotp.plan(model, 2, example_inputs=IMAGE)
    assert plan.totals.sent > 1.5 * sent, "the negative control"


def test_a_convolution_of_fewer_groups_than_ranks_is_split_within_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 32, 1), nn.Conv2d(32, 64, 3, groups=2), nn.ReLU(), nn.Conv2d(64, 8, 1))
    report = autotp.verify(model, 4, IMAGE)
    assert report and report.plan is not None
    totals = report.plan.totals
    assert totals.local_parameters <= 0.27 * totals.parameters


def test_a_sequence_is_split_by_examples_and_its_flops_count():
    torch.manual_seed(0)
    model = Layers(lambda x, recurrent: recurrent(x)[0], recurrent=nn.LSTM(16, 32, batch_first=True))
    plan = autotp.plan(model, 2, example_inputs=X)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert plan.totals.flops >= 2 * X.shape[0] * X.shape[1] * weights
    assert not any("random" in note for note in plan.notes)
    assert autotp.verify(model, 2, X)
