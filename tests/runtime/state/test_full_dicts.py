"""Whole tensors that are asked for stay as they were, whatever is done to the module afterwards; but with `live`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of


class Net(nn.Module):
    """A norm that is whole on every rank, two weights that are split, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.last = nn.LayerNorm(8)
        self.last.weight = self.norm.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.relu(self.up(self.norm(x)))) * self.scale)


def asked(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Names of what changed with the module, of copies and live, of weights and of gradients."""
    sharded: Any = autotp.compile(Net(), mesh=mesh_of(group), example_inputs=torch.ones(4, 8))
    sharded(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    out: dict[str, Any] = {}
    for live in (False, True):
        state, grads = sharded.full_state_dict(live=live), sharded.full_grad_dict(live=live)
        before = [{name: x.clone() for name, x in found.items()} for found in (state, grads)]
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1e-4)
        torch.optim.SGD(sharded.parameters(), 0.5).step()
        with torch.no_grad():
            sharded.scale += 1
        for kind, found, was in zip(("state", "grads"), (state, grads), before, strict=True):
            out[f"{kind} {live}"] = sorted(name for name, x in found.items() if not torch.equal(x, was[name]))
        out[f"tied {live}"] = state["norm.weight"] is state["last.weight"]
        sharded.load_state_dict(before[0])
        for p in sharded.parameters():
            p.grad.mul_(10)
    return out


def test_copies_stay_and_live_tensors_follow(pool):
    for found in pool.run(asked, world=2):
        assert found["state False"] == found["grads False"] == []
        assert {"norm.weight", "scale"} <= {*found["state True"]} and "norm.weight" in found["grads True"]
        assert found["tied False"] and found["tied True"]
