"""An optimizer that would step otherwise on parts than on whole parameters is refused before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

OPTIM: Any = torch.optim
NAMES = ("its own norms", "plain states", "Muon on pieces", "steps within steps", "a closure", "a list of its own")
NAMES += ("a function", "no words")


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


class ByFunction(Own):
    """As `Own`, by a function that it holds."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.growth = lambda held, factor=0.5: held.norm() * factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            held, grad = (x.to_local() if hasattr(x, "to_local") else x for x in (p, p.grad))
            held.sub_(grad * self.growth(held))


class NoWords(Own):
    """Fails on parts, and says nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            assert not hasattr(p, "to_local")
            p.sub_(p.grad)


class Shampoo(OPTIM.Optimizer):
    """Keeps two plain matrices for each weight."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

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


class LocalSam(Sam):
    def norm(self, grads: list[Any]) -> Tensor:
        return torch.stack([g.to_local().norm() if hasattr(g, "to_local") else g.norm() for g in grads]).norm()

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = group["lr"] * float(self.norm([p.grad for p in group["params"]]))
        self.base.step()


class Descent(OPTIM.Optimizer):
    """Lists its parameters beside the groups and asks for a closure, as LBFGS does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.listed = self.param_groups[0]["params"]

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        torch.enable_grad()(closure)()
        held = [(p.to_local(), p.grad.to_local()) if hasattr(p, "to_local") else (p, p.grad) for p in self.listed]
        norm = torch.cat([g.reshape(-1) for _, g in held]).norm()
        with torch.no_grad():
            for p, g in held:
                p.sub_(g * (0.1 / norm))


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
        "a list of its own": lambda: Descent(sharded.parameters(), lr=0.1),
        "a function": lambda: ByFunction(sharded.parameters(), lr=0.1),
        "no words": lambda: NoWords(sharded.parameters(), lr=0.1),
        "a closure": lambda: LocalSam([sharded.out.weight], OPTIM.SGD, lr=0.1),
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
    return found


def right(model: Any, sharded: Any, x: Tensor, base: Any) -> float:
    """How far two steps of `Sam` over an optimizer come out from the model's."""
    model.load_state_dict(sharded.full_state_dict())
    for m in (model, sharded):
        optimizer = Sam(list(m.parameters()), base, lr=0.1)

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


@pytest.fixture(scope="module")
def found(pool):
    return pool.run(refused, world=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_would_come_out_otherwise_is_refused(found, name):
    for each in found:
        assert each["pieces"] == 3
        kind, text, untouched = each[name]
        assert kind == "StateError" and "does not step on this module's parameters" in text and "AdamW" in text, text
        assert untouched, name


def test_an_optimizer_that_holds_another_and_needs_a_closure_is_right(found):
    assert all(max(each["right"]) < 1e-9 for each in found)
