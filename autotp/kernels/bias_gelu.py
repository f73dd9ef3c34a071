"""Bias + GeLU, exact or by tanh, which follow the first product of a feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import check_floats, check_vector, derived, jit, register, tl
from .tiles import as_rows, empty_like, loaded, power_of_two, programs, row_and_columns, tiles, wide

TILE = 1024  # columns of a row that a program computes


@jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:  # 0.5 (1 + tanh u) is the sigmoid of 2u
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@jit
def _slope(x, TANH: tl.constexpr):
    """Compute GeLU's derivative at float32 values."""
    if TANH:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return y


@jit
def _forward(x, bias, out, columns, x_row, TANH: tl.constexpr, TILE: tl.constexpr):
    row, column = row_and_columns(columns, TILE)
    inside = column < columns
    value = loaded(x + row * x_row + column, inside)
    value += loaded(bias + column, inside)
    tl.store(out + row * columns + column, _gelu(value, TANH), mask=inside)


@jit
def _backward(
    grad, x, bias, to_x, sums, rows, columns, grad_row, x_row, TANH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute a tile of columns of every n-th row; `sums` takes their sum, [programs, columns] in float32."""
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    b = loaded(bias + column, inside)
    total = tl.zeros([TILE], tl.float32)
    for i in range(first, rows, step):
        row = tl.cast(i, tl.int64)
        value = loaded(x + row * x_row + column, inside) + b
        d = loaded(grad + row * grad_row + column, inside) * _slope(value, TANH)
        tl.store(to_x + row * columns + column, d, mask=inside)
        total += d
    tl.store(sums + first * columns + column, total, mask=inside)


def _launch(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    out, rows, bias = empty_like(x), as_rows(x), bias.contiguous()
    tile = power_of_two(rows.shape[1], TILE)
    if out.numel():
        grid = (rows.shape[0] * tiles(rows.shape[1], tile),)
        _forward[grid](rows, bias, out, rows.shape[1], rows.stride(0), TANH=tanh, TILE=tile)
    return out


def _launch_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    to_x, d, rows, bias = empty_like(x), as_rows(grad), as_rows(x), bias.contiguous()
    n, columns = rows.shape
    if not x.numel():
        return to_x, torch.zeros_like(bias)
    tile = power_of_two(columns, TILE)
    across = tiles(columns, tile)
    count = min(n, tiles(programs(x, 8), across))
    sums = torch.empty((count, columns), dtype=torch.float32, device=x.device)
    _backward[count, across](d, rows, bias, to_x, sums, n, columns, d.stride(0), rows.stride(0), TANH=tanh, TILE=tile)
    return to_x, sums.sum(0).to(bias.dtype)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """Compute `gelu(x + bias)`, added and evaluated in float32 at least and rounded once.

    Args:
        x: [..., columns]. bias: [columns].
        tanh: GeLU by tanh, otherwise the exact one.

    Returns:
        In x's shape and dtype, contiguous.
    """
    return F.gelu(wide(x) + wide(bias), approximate="tanh" if tanh else "none").to(x.dtype).contiguous()


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `bias_gelu` for x and bias."""
    d = torch.ops.aten.gelu_backward(wide(grad), wide(x) + wide(bias), approximate="tanh" if tanh else "none")
    return d.to(x.dtype).contiguous(), as_rows(d).sum(0).to(bias.dtype)


def _check(x: Tensor, bias: Tensor, tanh: bool) -> None:
    check_floats("bias_gelu", x=x, bias=bias)
    check_vector("bias_gelu", "bias", bias, x)


register(
    "bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor",
    twin=bias_gelu, launch=_launch, check=_check,
)  # fmt: skip
register(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)",
    twin=bias_gelu_backward, launch=_launch_backward,
)  # fmt: skip
derived("bias_gelu", "bias_gelu_backward", (0, 1), (2,))
