"""Numbers and gradients against the original's, and a mesh of the pool's group."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def gradients_differ(sharded: Any, model: nn.Module) -> float:
    """Largest difference of a gradient, as a part of it and 1e-3 of the model's largest."""
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = sharded.full_grad_dict()
    assert found.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    parts = ((found[n] - g).abs().max() / (g.abs().max() + 1e-3 * largest) for n, g in wanted.items())
    return float(max(parts))
