"""Modules that keep a table from their first call on, that share it, and that hold what no graph reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError

WIDTH, LENGTH = 8, 16
X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))


class Table(nn.Module):
    """Computes positions in its first call, and reads them in later ones: a buffer, and how much of it is filled."""

    known: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.zeros(LENGTH, WIDTH), persistent=False)
        self.filled = 0

    def forward(self, length: int) -> Tensor:
        if length <= self.filled:
            return self.known[:length]
        made = torch.arange(length).unsqueeze(-1) / (1.0 + torch.arange(WIDTH))
        self.known[:length] = made.detach()
        self.filled = length
        return made


class Forgets(Table):
    """The same, but its later calls read something else."""

    def forward(self, length: int) -> Tensor:
        return super().forward(length) if self.filled < length else super().forward(length) * 2


class Layer(nn.Module):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.up = table, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x + self.table(x.shape[1]))


def layers(table: Table) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(table), Layer(table))


def test_a_table_of_the_first_call_that_layers_share(captured_once):
    model = layers(Table())
    assert autotp.verify(model, 2, X).capture_error == 0
    sharded: Any = autotp.compile(model, 1, example_inputs=X)
    for length in (6, 4, 6):
        torch.testing.assert_close(sharded(X[:, :length]), model(X[:, :length]))
    with pytest.raises(CaptureError, match="self-check: the captured graph is not the model"):
        autotp.plan(layers(Forgets()), 2, example_inputs=X)


class Attends(nn.Module):
    """Heads as they are written by hand: the flag is a condition on a size, and a buffer is sparse."""

    heads: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("heads", torch.eye(2).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.out(y.transpose(1, 2).flatten(-2))


def test_a_flag_that_is_a_condition_on_a_size(captured_once):
    model = Attends()
    report = autotp.verify(model, 2, X)
    assert report and report.capture_error == 0 and report.plan is not None
    assert "fixed" not in str(report.plan.notes)
    sharded: Any = autotp.compile(model, 1, example_inputs=X)
    for x in (X, X[:1, :4], X[:, :1]):
        torch.testing.assert_close(sharded(x), model(x))
    assert sharded.heads.is_sparse and torch.equal(sharded.heads.to_dense(), torch.eye(2))
