"""Whole states compared, and a module that has some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def stepped(tp: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Two layers after a step, so that there are momenta."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, tp, example_inputs=torch.randn(2, 8), **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for p in sharded.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return sharded, optimizer


def with_momenta(sharded: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    out: dict[str, Any] = sharded.full_state_dict()
    for i, p in enumerate(sharded.parameters()):
        momentum = optimizer.state[p].get("momentum_buffer", torch.zeros(()))
        out[f"momentum {i}"] = (momentum.to_local() if isinstance(momentum, DTensor) else momentum).clone()
    options = [[float(v or 0) for k, v in group.items() if k != "params"] for group in optimizer.param_groups]
    return out | {"options": torch.tensor(options)}
