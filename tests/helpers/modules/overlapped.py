"""Models whose collectives overlap, and calls counted in their programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import inputs_of, redrawn
from tests.helpers.modules.trained import model_of


class Feed(nn.Module):
    """A norm, two products of one value, and one whose sum is dealt out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Feed(width) for _ in range(3)), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(name: str) -> tuple[Any, Any]:
    """A model in float64, and its inputs."""
    torch.manual_seed(0)
    if name == "plain":
        return redrawn(Plain()).double(), torch.randn(2, 16, 16, dtype=torch.double)
    model = model_of(name, torch.float64)
    return model, inputs_of(model)


def called(module: Any, inputs: Any) -> Tensor:
    return module(inputs) if isinstance(inputs, Tensor) else module(**inputs).logits


def calls_of(sharded: Any, name: str) -> int:
    return sum(f" = {name}(" in line for line in sharded.graph.splitlines())
