"""Layers that checkpoint themselves, and the bytes that autograd keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Checkpoints its layers by itself, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        if self.way == "sequential":
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)  # type: ignore[return-value]
        if self.way == "none":
            return d(c(b(a(x)))).sin()
        if self.way == "closures":
            x = checkpoint(lambda y, z: b(a(y)).sin() * z, x, 2.0, use_reentrant=False)  # type: ignore[assignment]
            return checkpoint(lambda y: d(c(y)), x, use_reentrant=False)  # type: ignore[return-value]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.way == "reentrant")  # type: ignore[assignment]
        return x.sin()


def kept_bytes(module: Any, *args: Any, **kwargs: Any) -> int:
    """What autograd keeps of a forward, parameters apart."""
    own = {
        whose.untyped_storage().data_ptr() for p in module.parameters() for whose in (getattr(p, "_local_tensor", p),)
    }
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*args, **kwargs)
    return sum(seen.values())
