"""Delayed scaling in float8: histories are buffers of largest values over all ranks, also over dp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import InputError
from autotp.ir.layouts import Partial, R
from autotp.ir.marks import mark
from autotp.kernels.float8_numbers import GRADIENT, INPUT, scale_of
from autotp.proof.certificate.certificate import certificate
from tests.helpers.float8 import SMALL, Simulated, apart, one_device, train, words

OPS: Any = torch.ops.autotp
DELAYED: dict[str, Any] = {**SMALL, "recipe": "delayed"}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_hundred_steps_are_those_of_one_device(tp):
    model = Simulated(words(torch.float64), "delayed", tp)
    losses = one_device("delayed", torch.float64)
    assert apart(train(model), losses) < 1e-10
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]) and apart(losses, one_device("tensorwise", torch.float64)) > 1e-3


def by_hand(x: Tensor, weight: Tensor, grad: Tensor, history: list[list[float]]) -> tuple[Tensor, Tensor]:
    """A product and the gradient of its weight, by what earlier calls had; the history then has this call's."""
    values, types = (x, weight, grad), (INPUT, INPUT, GRADIENT)
    firsts = 0.0, 0.0, float(grad.abs().max())  # 0: the scale is 1
    seen = [max(h, default=first) for h, first in zip(history, firsts, strict=True)]
    scales = [scale_of(torch.tensor(amax), t) for amax, t in zip(seen, types, strict=True)]
    cast = [
        (v * s.double()).clamp(-torch.finfo(t).max, torch.finfo(t).max).to(t).double() * s.reciprocal().double()
        for v, s, t in zip(values, scales, types, strict=True)
    ]
    for v, own in zip(values, history, strict=True):
        own[:] = [*own, float(v.abs().max())][-3:]
    return cast[0] @ cast[1].t(), cast[2].t() @ cast[0]


def test_the_scales_are_those_of_earlier_calls_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(16, 32, bias=False).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "history": 3, "head": True})
    history: list[list[float]] = [[], [], []]
    for step in range(6):
        x, grad = (step + 1) * torch.randn(8, 16).double(), torch.randn(8, 32).double() / (step + 1)
        y = ours(x)
        y.backward(grad)
        wanted = by_hand(x, model.weight.detach(), grad, history)
        assert torch.allclose(y, wanted[0], rtol=1e-12) and torch.allclose(ours.weight.grad, wanted[1], rtol=1e-12)
        ours.zero_grad()


class Twice(nn.Module):
    """A layer that is called twice, within a region that is computed again in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(16, 16), again

    def both(self, x: Tensor) -> Tensor:
        return self.layer(3 * torch.tanh(self.layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.again else self.both(x)


def test_what_is_computed_again_has_the_scales_of_the_first_time():
    """And a layer that is called twice has one history, of the largest of both."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Twice(again).double(), torch.randn(4, 16, dtype=torch.float64)
        ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "head": True})
        for step in range(4):
            ours((step + 1) * x).square().sum().backward()
        found.append([ours.layer.weight.grad, ours.layer.float8_history, ours.layer.float8_latest])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    inside = 3 * torch.tanh(model.layer(4 * x)).abs().max()
    history = found[0][1]
    assert history[0, -1] == max(inside, 4 * x.abs().max()) and (history[:, -3:] > 0).all()


def test_in_evaluation_nothing_is_recorded():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision=DELAYED)
    ours(x).sum().backward()
    history = ours[0].float8_history
    ours.eval()(x)
    assert torch.equal(ours[0].float8_history, history) and float(ours[0].float8_latest) > 0
    ours.train()(x)
    assert not torch.equal(ours[0].float8_history, history)


def test_what_would_lose_the_largest_value_of_a_gradient_is_refused():
    with pytest.raises(InputError, match="backend='aot_eager'"):
        autotp.compile(nn.Linear(16, 16), 1, backend="aot_eager", precision="float8-delayed")


def test_a_history_that_is_reduced_over_a_wrong_group_is_refused_by_the_types():
    staged = Simulated(words(torch.float64), "delayed", 2).staged
    assert certificate(staged.planned, staged.sharded)
    graph, targets = staged.sharded.graph, (OPS.float8_record.default,)
    over = [n for n in graph.nodes if mark(n).conversion == (Partial("max"), R)]
    reduced = next(n for n in over if any(user.target in targets for user in n.users))
    # A maximum over any other ranks leaves the value a candidate among the tp ranks.
    reduced.replace_all_uses_with(reduced.args[0])
    graph.erase_node(reduced)
    refused = certificate(staged.planned, staged.sharded)
    assert not refused and "float8_record" in str(refused)
