"""`torch.autograd.Function`: captured with the backward that somebody wrote, or refused; with and without the check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.errors import CaptureError
from autotp.kernels.functions import CALLS
from autotp.rules import function_rules as rules
from tests.helpers.modules import functions as f

X = torch.randn(4, 3, f.WIDTH, generator=torch.Generator().manual_seed(0))


def equal_to(model: Any, sharded: Any) -> None:
    """Outputs and gradients of two calls, one of them with another size."""
    wide = next(model.parameters()).dtype
    for x in (X.to(wide), X[:2].to(wide)):
        torch.manual_seed(1)
        wanted = model(x)
        torch.manual_seed(1)
        found = sharded(x)
        torch.testing.assert_close(found, wanted)
        wanted.square().sum().backward()
        found.square().sum().backward()
    gradients = sharded.full_grad_dict()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad)


@pytest.mark.parametrize("check", [None, False])
def test_the_usual_ones_keep_their_backward_and_are_split(check, captured_once):
    model = f.usual()
    sharded: Any = autotp.compile(model, 1, example_inputs=X, check_capture=check)
    equal_to(model, sharded)
    assert torch.equal(sharded(X), model(X))
    plan = autotp.plan(model, 2, example_inputs=X, check_capture=check)
    assert {p.name for p in plan.parameters if p.local != p.shape} == {"up.weight", "up.bias", "scale", "down.weight"}
    assert plan.digest == autotp.plan(f.usual(), 2, example_inputs=X).digest
    assert autotp.verify(model, 2, X)


def _usual_on_ranks(rank: int, world: int, group: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    for model in (f.usual(), f.Uses(lambda m, x: f.Clipped.apply(x))):
        model.double()  # rounding tells no backward from another
        equal_to(model, autotp.compile(model, mesh=mesh, example_inputs=X.double(), check_capture=False))


def test_on_two_ranks(pool):
    pool.run(_usual_on_ranks, world=2)


@torch.library.custom_op("autotp_tests::clipped", mutates_args=())
def clipped(x: torch.Tensor) -> torch.Tensor:
    """Its backward is not linear in the gradient."""
    return x * 2


clipped.register_fake(torch.empty_like)
clipped.register_autograd(lambda ctx, gradient: gradient / gradient.norm())


def test_a_custom_operator_without_a_rule_gets_its_gradient_whole(monkeypatch):
    model = f.Uses(lambda m, x: clipped(x))
    assert autotp.verify(model, 2, X)
    monkeypatch.setattr("autotp.passes.shard.planner.OPAQUE", None)
    assert not autotp.verify(model, 2, X)


# Dimensions that stay whole.
WHOLE = {f.Later: (), f.Several: (2,), f.Rows: (2,), f.Counted: (2,)}
WHOLE |= dict.fromkeys((f.Clipped, f.Fixed, f.Noisy), (0, 1, 2))


@pytest.mark.parametrize("kind", WHOLE)
def test_others_are_split_where_forward_and_backward_allow_it(kind):
    CALLS.clear()
    model = f.Uses(lambda m, x: kind.apply(x)[0] * kind.apply(x)[2] if kind is f.Several else kind.apply(x))
    sharded: Any = autotp.compile(model, 1, example_inputs=X, check_capture=False)
    equal_to(model, sharded)
    assert autotp.verify(model, 2, X)
    (called,) = CALLS.values()
    split = {ins[0] for ins, _ in called.loops[(3,)]}
    assert split == {0, 1, 2} - {*WHOLE[kind]}
    assert called.linear == (kind not in (f.Clipped, f.Rows))


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (lambda m, x: f.read_after(x * 1), "it writes to an argument that is read afterwards"),
        (lambda m, x: x * f.weight_written(m), "it writes to an argument that is an input or a weight"),
        (lambda m, x: f.Held.apply(x, m.up), "it is given a Linear, which may hold tensors"),
        (lambda m, x: f.Foreign.apply(x), "Foreign.apply"),
        (lambda m, x: f.Decides.apply(x), "data-dependent"),
        (f.closes_over, "Closes.apply"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_line(between, told):
    for empty in (False, True):
        with torch.device("meta" if empty else "cpu"):
            model = f.Uses(between)
        with pytest.raises(CaptureError) as caught:
            autotp.plan(model, 2, example_inputs=X, check_capture=False)
        text = str(caught.value)
        assert told in text and "cannot be captured with its own backward" in text and "Pass every tensor" in text
        assert ".apply(x" in text and ("test_functions.py:" in text or "functions.py:" in text)


def test_writes_to_an_argument_that_nothing_reads_afterwards():
    CALLS.clear()
    models = [f.Uses(lambda m, x, kind=kind: kind.apply(x * 1)) for kind in (f.InPlace, f.Shifts)]
    blocks = nn.Sequential(nn.Linear(3, f.WIDTH), *(f.Written() for _ in range(4)))
    for model, x in ((models[0], X), (models[1], X), (blocks, torch.randn(4, 3))):
        sharded: Any = autotp.compile(model, 1, example_inputs=x, check_capture=False)
        torch.testing.assert_close(sharded(x), model(x))
        assert autotp.verify(model, 2, x)
    assert len(CALLS) == 2 and all(called.writes for called in CALLS.values())


def test_the_guards_of_the_rule_are_needed(monkeypatch):
    """The negative controls: without each of them a simulated rank computes something else."""

    def differs(kind: Any) -> bool:
        CALLS.clear()
        return not autotp.verify(f.Uses(lambda m, x: kind.apply(x)), 2, X)

    with monkeypatch.context() as patch:
        patch.setattr("autotp.capture.autograd_functions.linear_backward", lambda *_: True)
        assert differs(f.Clipped)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "SHAPED", (*rules.SHAPED, torch.ops.aten.div))
        assert differs(f.Counted)


def test_equal_calls_are_one_and_others_are_not():
    def made(by: float) -> Any:
        class Times(f.Doubled):
            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return grads[0] * by

        return Times

    CALLS.clear()
    for kind in (made(2.0), made(2.0), made(3.0)):
        model = f.Uses(lambda m, x, kind=kind: kind.apply(x))
        equal_to(model, autotp.compile(model, 1, example_inputs=X, check_capture=False))
    assert len(CALLS) == 2
