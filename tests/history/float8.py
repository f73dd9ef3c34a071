"""Rows of training in float8: whose largest values a scale is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard as Split

from .mutants import drop
from .row import WIDTH, Row

PAIR: dict[str, Any] = {"up.weight": Split(0), "down.weight": Split(1)}
RECIPE: dict[str, Any] = {"smallest": 16, "head": True}


class Delayed(nn.Module):
    """Delayed scaling: the scale of a cast is of the largest values of the calls before, which a buffer keeps."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("history", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(x))
        scale = 448 / self.history.amax()
        self.history = torch.cat([self.history[1:], x.detach().abs().amax().view(1)])
        rounded = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return self.down(x + (rounded - x).detach())


class Pair(nn.Module):
    """Two layers that are computed in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(torch.relu(self.up(x)))


ROWS = [
    Row(41, "TE#335, Megatron#442", "FP8: the largest values are reduced over the wrong group", Delayed,
        drop("all_reduce", "amax_1"), "the history has a rank's own largest value", "amax_1|cat|history", PAIR, seed=0),
    Row(42, "TE#74, Primus#669", "FP8: a switch leaves out the reduction that sequence parallelism needs", Pair,
        drop("all_reduce", "float8_amax_default$"), "the scale is of a rank's own tokens", "float8_amax|float8_cast",
        PAIR, sequence=True, seed=0, precision=RECIPE),
    Row(43, "TE#600", "FP8: the scales of gradients part between the ranks", Pair,
        drop("f", "float8_linear_default$"), "the gradient's scale is of a rank's own part",
        "float8_linear|float8_seen", PAIR, precision=RECIPE),
]  # fmt: skip
