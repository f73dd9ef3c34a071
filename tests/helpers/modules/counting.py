"""A module whose buffers its forward changes, with dropout in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Counting(nn.Module):
    """Buffers that the forward changes: running statistics, a counter, one replaced; and dropout."""

    calls: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(16))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.calls)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0, rows: Tensor | None = None) -> dict[str, Any]:
        self.calls += 1
        y = self.norm(self.down(self.drop(torch.relu(self.up(x)))) * (self.total + scale))
        self.total = self.total + x.detach().sum(0)
        return {"y": y if rows is None else y + rows, "more": (y.sum(), None, [self.calls * 2], scale)}
