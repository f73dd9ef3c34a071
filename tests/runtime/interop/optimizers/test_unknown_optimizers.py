"""An optimizer of which nobody says that it steps on parts as on wholes is refused before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prodigyopt import Prodigy
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

OPTIM: Any = torch.optim
NAMES = ("its own norms", "plain states", "Muon on pieces", "steps within steps", "of a known one", "other options")


class Own(OPTIM.Optimizer):
    """Trains by a norm of what the rank holds, as code does that knows tensors only."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                held, grad = (x.to_local() if hasattr(x, "to_local") else x for x in (p, p.grad))
                held.sub_(grad * (group["lr"] * held.norm() / grad.norm()))


class Signs(Own):
    """Updates element by element, and says that it does."""

    right_for_shards = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])


class Decayed(OPTIM.AdamW):
    """Of a known class, with a step of its own: what is known of that one is not known of this one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(float(torch.linalg.vector_norm(p.to_local() if hasattr(p, "to_local") else p)))
        super().step(closure)


class Shampoo(Own):
    """Keeps two plain matrices for each weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)  # before it fails
                left = self.state[p].setdefault("left", torch.eye(len(p), dtype=p.dtype))
                left.add_(p.grad @ p.grad.T)
                p.sub_(group["lr"] * torch.linalg.solve(left, p.grad))


class Sam(OPTIM.Optimizer):
    """Steps by the gradients at a worse point nearby, by an optimizer that it holds (Foret et al. 2021)."""

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([g.norm() for g in grads]).norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        scale = 0.05 / self.norm([p.grad for p in parameters])
        moves = [p.grad * scale for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
        self.base.step()


class Attention(nn.Module):
    """Four heads that share two keys and values; q, k and v come from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def refused(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 8).double(), Attention().double()
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    pieces = [p for n, p in sharded.named_parameters() if "qkv" in n and p.ndim == 2]
    makers: dict[str, Callable[[], Any]] = {
        "its own norms": lambda: Own(sharded.parameters(), lr=0.1),
        "plain states": lambda: Shampoo([sharded.out.weight], lr=0.1),
        "Muon on pieces": lambda: OPTIM.Muon(pieces, lr=0.1),
        "steps within steps": lambda: Sam(list(sharded.parameters()), Own, lr=0.1),
        "of a known one": lambda: Decayed(sharded.parameters(), lr=0.1),
        "other options": lambda: Prodigy(sharded.parameters(), slice_p=11),
    }

    def closure() -> Tensor:
        return sharded(x).square().mean()

    found: dict[str, Any] = {"pieces": len(pieces)}
    before = sharded.full_state_dict()
    for name, make in makers.items():
        sharded.zero_grad()
        sharded(x).square().mean().backward()
        optimizer = make()
        kind, text, _ = error_of(lambda step=optimizer.step: step(closure))
        after = sharded.full_state_dict()
        found[name] = kind, text, all(torch.equal(before[n], t) for n, t in after.items()) and not optimizer.state
    found["right"] = [right(model, sharded, x, base) for base in (OPTIM.SGD, OPTIM.AdamW)]
    found["signs"] = signs(model, sharded, x)
    found["after a failure"] = failing(sharded, x)
    return found


def right(model: Any, sharded: Any, x: Tensor, base: Any) -> float:
    """How far two steps of `Sam` over an optimizer come out from the model's."""
    model.load_state_dict(sharded.full_state_dict())
    for m in (model, sharded):
        optimizer = Sam(list(m.parameters()), base, lr=0.1)
        optimizer.right_for_shards = True

        def closure(m: Any = m, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            closure()
            optimizer.step(closure)
    found = sharded.full_state_dict()
    return max(float((found[n] - t).abs().max()) for n, t in model.state_dict().items())


def signs(model: Any, sharded: Any, x: Tensor) -> float:
    """How far a step of an optimizer that says of itself that it is right comes out from the model's."""
    model.load_state_dict(sharded.full_state_dict())
    for m in (model, sharded):
        m.zero_grad()
        m(x).square().mean().backward()
        Signs(m.parameters(), lr=0.1).step()
    found = sharded.full_state_dict()
    return max(float((found[n] - t).abs().max()) for n, t in model.state_dict().items())


def failing(sharded: Any, x: Tensor) -> str:
    """What a number asked of a part is after a step that failed, and a forward: no step is under way."""
    optimizer = Signs([sharded.out.weight], lr=0.1)
    optimizer.param_groups[0]["lr"] = "no number"
    sharded(x).square().mean().backward()
    with pytest.raises(TypeError):
        optimizer.step()
    sharded(x)
    return error_of(sharded.out.weight.norm().item)[1]


@pytest.fixture(scope="module")
def found(pool):
    return pool.run(refused, world=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_nobody_answers_for_is_refused(found, name):
    for each in found:
        assert each["pieces"] == 3
        kind, text, untouched = each[name]
        assert kind == "StateError" and "step on this module's parameters as on the model's" in text, text
        assert "AdamW" in text and "right_for_shards = True" in text, text
        assert untouched, name


def test_one_that_the_user_answers_for_steps(found):
    assert all(max(each["right"]) < 1e-9 and each["signs"] < 1e-12 for each in found)


def test_a_step_that_failed_is_over_with_the_next_forward(found):
    assert all("a number was asked" in each["after a failure"] for each in found)
