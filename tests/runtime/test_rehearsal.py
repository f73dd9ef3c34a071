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
NAMES = ("its own norms", "plain states", "Muon on pieces")


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
    }
    found: dict[str, Any] = {"pieces": len(pieces)}
    before = sharded.full_state_dict()
    for name, make in makers.items():
        sharded.zero_grad()
        sharded(x).square().mean().backward()
        optimizer = make()
        kind, text, _ = error_of(optimizer.step)
        after = sharded.full_state_dict()
        found[name] = kind, text, all(torch.equal(before[n], t) for n, t in after.items()) and not optimizer.state
    return found


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
