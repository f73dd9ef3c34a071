"""Operators that torch cannot differentiate on a shard without elements are not split so that a rank has none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import autotp
from autotp.ir.op import Op, Rule, aten
from autotp.rules.core import RULES
from tests.fuzz.plans import any_plan

complex_pairs = RULES[aten.view_as_real.default]


class Fourier(nn.Module):
    """A transform, whose pairs of numbers are added up: their gradient is expanded, and no memory lies behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.view_as_real(torch.fft.fft(self.up(x))).sum(-1).tanh()


def proved(seed: int) -> bool:
    """Five places over four ranks, by a drawn plan: dealt, the last rank has none."""
    torch.manual_seed(0)
    with any_plan(seed):
        return bool(autotp.verify(Fourier(), 4, torch.randn(2, 5, 8)))


def test_pairs_of_numbers_are_there_on_every_rank(monkeypatch):
    assert proved(4) and proved(8)

    def anywhere(op: Op) -> Rule:
        return replace(complex_pairs(op), empty=True)

    monkeypatch.setitem(RULES, aten.view_as_real.default, anywhere)
    assert not proved(4) and not proved(8)
