"""Operators that autotp knows nothing of, as a user makes them; importable by the workers of the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from autotp.rules.core import RULES


@torch.library.custom_op("autotp_tests::project", mutates_args=())
def project(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., k) and w (k, n) to (..., n)."""
    y = x @ w
    return y if bias is None else y + bias


@project.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.bias = inputs[2] is not None


def _project_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    rows = list(range(x.ndim - 1))
    return grad @ w.t(), torch.einsum("...k,...n->kn", x, grad), grad.sum(rows) if ctx.bias else None


project.register_autograd(_project_backward, setup_context=_save)


@torch.library.custom_op("autotp_tests::halves", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    """Rows of x (n, m) by twos, without a derivative."""
    return [x[0::2].clone(), x[1::2].clone()]


@halves.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x[0::2]), torch.empty_like(x[1::2])]


@torch.library.custom_op("autotp_tests::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    """x (..., n) turned by one along its last dimension, without a derivative."""
    return x.roll(1, -1)


@turn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autotp_tests::halve", mutates_args=(), tags=(torch.Tag.pointwise,))
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autotp_tests::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1.0)


@torch.library.custom_op("autotp_tests::faceless", mutates_args=())
def faceless(x: Tensor) -> Tensor:
    """Has no fake kernel."""
    return x.clone()


@torch.library.custom_op("autotp_tests::size", mutates_args=())
def size(x: Tensor) -> int:
    return x.shape[0]


class Projected(nn.Module):
    """An MLP of one custom operator and one linear layer."""

    def __init__(self, width: int = 16, inner: int = 48) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, inner) / 4)
        self.bias = nn.Parameter(torch.randn(inner))
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(project(x, self.w, self.bias).relu())


class Turned(nn.Module):
    """Between two linear layers an operator that cannot be differentiated."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(turn(self.up(x)))


PROJECT = {"rule": "...k,kn,n->...n", "linear": [("x", "bias"), ("w", "bias")], "addends": ["bias"]}


@contextlib.contextmanager
def registered(op: Any = project, **options: Any) -> Iterator[Any]:
    """The operator has this rule here, and the table is afterwards as it was."""
    held = dict(RULES)
    try:
        yield autotp.register_rule(op, **(options or PROJECT))
    finally:
        RULES.clear()
        RULES.update(held)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def example() -> torch.Tensor:
    return torch.randn(4, 6, 16)
