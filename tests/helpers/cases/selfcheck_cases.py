"""Modules that count, for the self-check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    """One linear layer, dropout, and buffers; what is done with them is each subclass's."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return self.drop(self.norm(self.up(x))) * self.steps


class Counter(Net):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.up(x) * self.calls
