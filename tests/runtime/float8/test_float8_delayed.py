"""Delayed scaling in float8: histories are buffers of largest values over all ranks, also over dp."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import InputError, StateError
from autotp.ir import scopes
from autotp.ir.layouts import Partial, R
from autotp.ir.marks import mark
from autotp.kernels import float8 as kernels
from autotp.kernels.float8 import GRADIENT, INPUT, scale_of
from autotp.proof.certificate import certificate
from tests.helpers.modules import float8 as helper
from tests.helpers.modules.float8 import SMALL, WIDTH, Block, Simulated, apart, one_device, sharded, train, words

OPS: Any = torch.ops.autotp
DELAYED: dict[str, Any] = {**SMALL, "recipe": "delayed"}


def test_a_hundred_steps_are_those_of_one_device():
    model = Simulated(words(torch.float64), "delayed", 2)
    losses = one_device("delayed", torch.float64)
    assert apart(train(model), losses) < 1e-10
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]) and apart(losses, one_device("tensorwise", torch.float64)) > 1e-3


def by_hand(x: Tensor, weight: Tensor, grad: Tensor, history: list[list[float]]) -> tuple[Tensor, Tensor]:
    """A product and the gradient of its weight, by what earlier calls had; the history then has this call's."""
    values, types = (x, weight, grad), (INPUT, INPUT, GRADIENT)
    firsts = 0.0, 0.0, float(grad.abs().max())  # 0: the scale is 1
    seen = [max(h, default=first) for h, first in zip(history, firsts, strict=True)]
    scales = [scale_of(torch.tensor(amax), t, power=True) for amax, t in zip(seen, types, strict=True)]
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


def test_an_overflow_shows_in_its_step_and_leaves_no_trace_in_the_next():
    """As under a gradient scaler, which leaves that step out: clamped to a number it would be taken."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    grads = torch.randn(4, 8, 32)
    found = []
    for overflow in (False, True):
        ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "history": 3, "head": True})
        for step, grad in enumerate(grads):
            if step == 1:
                grad = grad.clone()
                grad[0, 0] = float("inf") if overflow else 0.0
            ours.zero_grad()
            ours(x).backward(grad)
            if step == 1:
                assert ours.weight.grad.isfinite().all() != overflow
        found.append(ours.weight.grad)
    assert torch.equal(*found)


class Twice(nn.Module):
    """A layer that is called twice, within a region that is computed again in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(16, 16), again

    def both(self, x: Tensor) -> Tensor:
        return self.layer(3 * torch.tanh(self.layer(2 * x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.again else self.both(x)


def test_what_is_computed_again_has_the_scales_of_the_first_time(monkeypatch):
    """A layer that is called twice has one history, of the largest of both; and its region stays one."""
    regions = Mock(wraps=checkpoint)
    monkeypatch.setattr(scopes, "checkpoint", regions)
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Twice(again).double(), torch.randn(4, 16, dtype=torch.float64)
        ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "head": True})
        for step in range(4):
            ours((step + 1) * x).square().sum().backward()
        found.append([ours.layer.weight.grad, ours.layer.float8_history, ours.layer.float8_latest])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and regions.call_count == 4
    inside = 3 * torch.tanh(model.layer(8 * x)).abs().max()
    history = found[0][1]
    assert history[0, -1] == max(inside, 8 * x.abs().max()) and (history[:, -3:] > 0).all()


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward, by a user who put this in its place."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(self.layer, **kwargs), *args, use_reentrant=self.reentrant)


def layers(again: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients and histories after four steps of two layers."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    model = nn.Sequential(nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))).double()
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "head": True}, check_capture=False)
    for i in range(2 if again else 0):
        setattr(ours[0], str(i), Checkpointed(ours[0][i], again == "reentrant"))
    for step in range(4):
        ours((step + 1) * x.requires_grad_()).square().sum().backward()
    histories = [b for n, b in ours.named_buffers() if "float8" in n]
    assert all((h[:, -3:] > 0).all() for h in histories if h.ndim) and len(histories) == 28
    return ours.full_grad_dict(), histories


@pytest.mark.parametrize("again", ["reentrant", "not reentrant"])
def test_wrapped_layers_are_computed_again_with_the_scales_of_the_first_time(again):
    (found, histories), (wanted, others) = layers(again), layers("")
    assert all(torch.equal(found[n], g) for n, g in wanted.items())
    assert all(torch.equal(a, b) for a, b in zip(histories, others, strict=True))


def test_a_whole_module_that_is_computed_again_is_refused():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision=DELAYED)
    y = checkpoint(ours, x.requires_grad_(), use_reentrant=False)
    with pytest.raises(StateError, match="Put checkpoint around its layers"):
        y.sum().backward()
    dynamic: Any = autotp.compile(model, 1, example_inputs=x, precision=SMALL)
    checkpoint(dynamic, x, use_reentrant=False).sum().backward()


class Nudged(nn.Module):
    """Before every call histories are off by what a sum in another order leaves in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        for name, buffer in self.model.named_buffers():
            if "float8" in name:
                buffer.mul_(1 + 2e-7)
        return self.model(ids)


def test_last_bits_of_largest_values_move_no_number(monkeypatch):
    """A scale that is a power of two is the same for both. By 448 over the largest value all are scaled a little
    otherwise, one that lies between two numbers of float8 goes to the other, and every later step is another."""
    monkeypatch.setattr(helper, "STEPS", 30)

    def runs() -> tuple[list[float], list[float]]:
        plain, nudged = (sharded(words(torch.float64), "delayed", tp=1) for _ in range(2))
        return train(plain), train(Nudged(nudged))

    plain, nudged = runs()
    assert plain == nudged
    monkeypatch.setattr(kernels, "raised", lambda amax: amax)
    assert apart(*runs()) > 1e-4


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
