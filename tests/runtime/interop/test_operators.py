"""Numbers that torch takes from a rank's own part: an overflow, a norm, an optimizer's step are the whole model's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of
from tests.helpers.modules.trained import three_steps

OPTIM: Any = torch.optim


class Lamb(OPTIM.Optimizer):
    """Scales an update by two norms, which it takes as numbers of Python."""

    right_for_shards = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad / (p.grad.abs() + 1e-2)
                p.add_(update, alpha=-group["lr"] * p.data.norm(2).item() / float(update.norm()))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD fused": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adagrad fused": lambda p: OPTIM.Adagrad(p, lr=0.1, fused=True),
    "Adafactor": lambda p: OPTIM.Adafactor(p, lr=0.1, foreach=False),
    "Adafactor foreach": lambda p: OPTIM.Adafactor(p, lr=0.1, foreach=True),
    "Rprop": lambda p: OPTIM.Rprop(p, lr=0.1, foreach=False),
    "Rprop foreach": lambda p: OPTIM.Rprop(p, lr=0.1, foreach=True),
    "LBFGS": lambda p: OPTIM.LBFGS(p, lr=0.1, max_iter=3),
    "LAMB": lambda p: Lamb(p, lr=0.1),
    "Muon": lambda p: OPTIM.Muon([x for x in p if x.ndim == 2], lr=0.1),
}


def made(group: Any) -> tuple[nn.Module, Any, Tensor]:
    """A model whose first parameter is whole on every rank, in float64; sharded; its input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).double()
    x = torch.randn(4, 8).double()
    return model, autotp.compile(model, example_inputs=x, mesh=mesh_of(group)), x


def loss_of(module: Any, x: Tensor) -> Tensor:
    return (module(x) - 1).square().mean()


def steps(model: Any, sharded: Any, x: Tensor, make: Callable[[Any], Any]) -> float:
    """Largest difference after three steps, as a part of the largest change of a weight."""
    start = {n: t.clone() for n, t in model.state_dict().items()}
    with patch.object(Tensor, "bfloat16", Tensor.double):  # in which Muon iterates: its rounding would hide the rest
        for m in (model, sharded):
            three_steps(m, make, lambda m: loss_of(m, x))
    found, wanted = sharded.full_state_dict(), model.state_dict()
    moved = max(float((wanted[n] - t).abs().max()) for n, t in start.items())
    apart = max(float((found[n] - t).abs().max()) for n, t in wanted.items())
    model.load_state_dict(start)
    sharded.load_state_dict(start)
    return apart / moved


def scaled(sharded: Any, x: Tensor, order: int, unscale: bool, last: bool) -> tuple[bool, float]:
    """Whether a step was skipped, and the scale, where a gradient overflows on the last rank."""
    whole = [p for p in sharded.parameters() if p.placements[0].is_replicate()]
    split = [p for p in sharded.parameters() if not p.placements[0].is_replicate()]
    mixed = [whole[0], *split, *whole[1:]][::order]
    groups: Any = [mixed, [{"params": whole}, {"params": split}]][order == 1]
    optimizer, scaler = OPTIM.SGD(groups, lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(sharded, x)).backward()
    if last:
        split[0].grad.to_local()[0, 0] = math.inf
    before = [p.to_local().clone() for p in sharded.parameters()]
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, p.to_local()) for a, p in zip(before, sharded.parameters(), strict=True))
    sharded.zero_grad()
    return same, scaler.get_scale()


def by_hand(model: Any, sharded: Any, x: Tensor) -> list[Any]:
    """What the norm of a gradient says on this rank, asked for in the ways of a user."""
    for m in (model, sharded):
        m.zero_grad()
        loss_of(m, x).backward()
    grad, wanted = sharded[1].weight.grad, model[1].weight.grad.norm().item()
    ways: list[Callable[[], Any]] = [
        lambda: float(grad.norm()), lambda: grad.data.norm(2).item(), lambda: bool(grad.sum()), lambda: int(grad.amax())
    ]  # fmt: skip
    clipped = [nn.utils.clip_grad_norm_(m.parameters(), 1e9).item() for m in (model, sharded)]
    whole = grad.norm().full_tensor().item(), sharded[0].weight.grad.norm().item()
    right = wanted, model[0].weight.grad.norm().item()
    return [*map(error_of, ways), clipped, [whole, right]]


def everything(rank: int, world: int, group: Any) -> dict[str, Any]:
    model, sharded, x = made(group)
    one = torch.distributed.get_rank() == 0
    found: dict[str, Any] = {"norms": by_hand(model, sharded, x)}
    if one:
        found["alone"] = error_of(lambda: sharded[1].weight.grad.norm().item())
    found["together"] = bool(sharded[1].weight.grad.norm() > 0), bool(sharded[1].weight.grad.norm() > 1e9)
    found["scaled"] = [scaled(sharded, x, order, unscale, not one) for order in (1, -1) for unscale in (False, True)]
    found["steps"] = {name: steps(model, sharded, x, make) for name, make in OPTIMIZERS.items()}
    loss_of(sharded, x).backward()
    found["apart"] = error_of(lambda: bool(sharded[1].weight.grad.norm() > 0) if one else sharded(x))
    return found


@pytest.fixture(scope="module")
def found(pool):
    return pool.run(everything, world=2)


def test_an_overflow_skips_the_step_on_all_ranks_whichever_parameter_is_first(found):
    for each in found:
        assert each["scaled"] == [(True, 32.0)] * 4, each["scaled"]


def test_a_norm_by_hand_is_the_whole_tensors_or_refused_on_every_rank(found):
    for each in found:
        *refused, clipped, whole = each["norms"]
        assert all(kind == "StateError" and ".full_tensor()" in text for kind, text, _ in refused), refused
        for a, b in (clipped, *zip(*whole, strict=True)):
            assert a == pytest.approx(b, rel=1e-12)
        assert each["together"] == (True, False)
        assert each["apart"][0] == "RankError" and "torch, () from _NormP" in each["apart"][1], each["apart"]
    assert ".full_tensor()" in found[0]["alone"][1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_model(found, name):
    for each in found:
        assert each["steps"][name] < 1e-9, each["steps"]
