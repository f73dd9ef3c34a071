"""Factories that the command line is given as FILE:FUNCTION, right ones and wrong ones."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.modules.custom_ops import Turned


def small() -> tuple[nn.Module, torch.Tensor]:
    """A factory."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(4, 6, 16)


def noisy() -> tuple[nn.Module, torch.Tensor]:
    print("a factory that prints")
    return small()


def broken() -> nn.Module:
    raise RuntimeError("no such weights\non this machine")


def bare() -> nn.Module:
    return nn.Linear(8, 8)


def turned() -> tuple[nn.Module, torch.Tensor]:
    return Turned(), torch.randn(4, 16)


class Branch(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input if super().forward(input).sum() > 0 else super().forward(input + 1)


def branch() -> tuple[nn.Module, torch.Tensor]:
    return Branch(8, 8), torch.randn(2, 8)


SMALL = "tests.helpers.modules.factories:small"
