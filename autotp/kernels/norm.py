"""Norms: LayerNorm and RMSNorm, with a residual added before where there is one.

Statistics are in float32. A program holds whole rows, so rows have a largest length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import OPS, check_floats, check_same, check_vector, differentiable, jit, refuse, register, tl
from .tiles import as_rows, empty_like, loaded, power_of_two, programs, tiles, wide

Norm = tuple[Tensor, Tensor]
MAX_COLUMNS = 16384  # of a row: a program holds it whole
TILE = 1024  # elements that a program holds at least: of several rows, where they are short


@jit
def _value(x, residual, at, residual_at, inside, ADD: tl.constexpr):
    """Load what is normalised, in float32: rounded to x's dtype after the addition, as it is stored."""
    value = loaded(x + at, inside)
    if ADD:
        value += loaded(residual + residual_at, inside)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@jit
def _scaled(value, weight, bias, column, columns, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    if WEIGHT:
        value *= loaded(weight + column, column < columns)
    if BIAS:
        value += loaded(bias + column, column < columns)
    return value


@jit
def _forward(
    x, residual, weight, bias, out, total, stats, rows, columns, eps, x_row, residual_row,
    CENTRED: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise a few rows, which the program holds."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    value = _value(x, residual, row * x_row + column, row * residual_row + column, inside, ADD)
    if ADD:
        tl.store(total + row * columns + column, value, mask=inside)
    mean = tl.zeros([ROWS, 1], tl.float32)
    if CENTRED:
        mean = tl.sum(value, 1, keep_dims=True) / columns
        value = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / columns + eps)
    y = _scaled(value * scale, weight, bias, column, columns, WEIGHT, BIAS)
    tl.store(out + row * columns + column, y, mask=inside)
    tl.store(stats + row, mean, mask=row < rows)
    tl.store(stats + rows + row, scale, mask=row < rows)


@jit
def _normal_and_slope(
    grad, x, weight, row, column, columns, inside, mean, scale, grad_row, x_row, WEIGHT: tl.constexpr
):  # fmt: skip
    """Load the normalised value, the incoming gradient, and that gradient times the weight."""
    normal = (loaded(x + row * x_row + column, inside) - mean) * scale
    normal = tl.where(inside, normal, 0.0)
    incoming = loaded(grad + row * grad_row + column, inside)
    return normal, incoming, _scaled(incoming, weight, weight, column, columns, WEIGHT, False)


@jit
def _store_gradient(to_x, extra, value, row, column, columns, extra_row, inside, EXTRA: tl.constexpr):
    if EXTRA:
        value += loaded(extra + row * extra_row + column, inside)
    tl.store(to_x + row * columns + column, value, mask=inside)


@jit
def _backward(
    grad, extra, x, stats, weight, to_x, sums, rows, columns, grad_row, extra_row, x_row,
    CENTRED: tl.constexpr, EXTRA: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute every n-th block of rows; `sums` takes the sums for weight and bias, [2, programs, columns]."""
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    to_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    to_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(first, tl.cdiv(rows, ROWS), step):
        # As int64: in 40,000 rows of 65,536 columns the last offset is more than 2^31.
        row = tl.cast(i, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        mean = tl.load(stats + row, mask=row < rows, other=0)
        scale = tl.load(stats + rows + row, mask=row < rows, other=0)
        normal, incoming, g = _normal_and_slope(
            grad, x, weight, row, column, columns, inside, mean, scale, grad_row, x_row, WEIGHT
        )  # fmt: skip
        # The gradient has no part along x, and where the mean is taken off none along ones: the norm does not see
        # these.
        value = g - normal * (tl.sum(g * normal, 1, keep_dims=True) / columns)
        if CENTRED:
            value -= tl.sum(g, 1, keep_dims=True) / columns
        _store_gradient(to_x, extra, value * scale, row, column, columns, extra_row, inside, EXTRA)
        if WEIGHT:
            to_weight += incoming * normal
        if BIAS:
            to_bias += incoming
    # Each program has sums of its own: added up atomically they would be in another order in each run.
    at = first * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    if WEIGHT:
        tl.store(sums + at, tl.sum(to_weight, 0), mask=inside)
    if BIAS:
        tl.store(sums + step * columns + at, tl.sum(to_bias, 0), mask=inside)


def _block(columns: int) -> dict[str, int]:
    """Return the options that a kernel is compiled with: how many rows a program holds, of how many columns."""
    block = power_of_two(columns, MAX_COLUMNS)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(16, rows * block // 512))}


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the normalised value, the sum (x itself where nothing is added), and mean and scale of every row.

    Args:
        x: [rows, width]; residual: of the same shape, added first, or None.
        weight, bias: [width], or None.
        eps: added to the variance.
        centred: subtract the mean (layer norm), or not (RMS norm).
    """
    out, total, rows = empty_like(x), x if residual is None else empty_like(x), as_rows(x)
    other = rows if residual is None else as_rows(residual)
    n, columns = rows.shape
    stats = torch.empty((2, n), dtype=torch.float32, device=x.device)
    compiled = _block(columns)
    vectors = [x, x]
    for i, v in enumerate((weight, bias)):
        vectors[i] = x if v is None else v.contiguous()
    if n:
        _forward[tiles(n, compiled["ROWS"]),](
            rows, other, *vectors, out, total, stats, n, columns, eps, rows.stride(0), other.stride(0),
            CENTRED=centred, ADD=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None, **compiled,
        )  # fmt: skip
    return out, total, stats


def _launch_backward(
    grad: Tensor | None, extra: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    to_x, rows, d = empty_like(x), as_rows(x), as_rows(torch.zeros_like(x) if grad is None else grad)
    other = d if extra is None else as_rows(extra)
    n, columns = rows.shape
    compiled = _block(columns)
    count = min(tiles(n, compiled["ROWS"]), programs(x, max(2, 32 // compiled["num_warps"])))
    # Of no rows no kernel runs, and the sums are zeros.
    make, biased = torch.empty if n else torch.zeros, bias is not None
    vectors = 1 + biased if biased or weight is not None else 0
    summed = make((vectors, count, columns), dtype=torch.float32, device=x.device)
    if n:
        _backward[count,](
            d, other, rows, stats, x if weight is None else weight.contiguous(), to_x, summed, n, columns,
            d.stride(0), other.stride(0), rows.stride(0),
            CENTRED=centred, EXTRA=extra is not None, WEIGHT=weight is not None, BIAS=biased, **compiled,
        )  # fmt: skip
    sums = summed.sum(1)
    to_weight = _gradient_of(weight, stats if weight is None else sums[0])
    return to_x, to_weight, _gradient_of(bias, stats if bias is None else sums[1])


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Norm:
    """Normalise the last dimension, with statistics in float32 at least.

    Args:
        x: [..., columns]. weight, bias: [columns], of any of the dtypes.
        eps: added to the variance, or mean square.
        centred: subtract the mean: LayerNorm, otherwise RMSNorm (Zhang and Sennrich 2019).

    Returns:
        The normalised value in x's shape and dtype, rounded once; and of every row its mean (0 if not centred) and
        1 / sqrt(variance + eps), [2, rows].
    """
    value = wide(x)
    mean = value.mean(-1, keepdim=True) if centred else value.new_zeros((*x.shape[:-1], 1))
    value = value - mean
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    y = value * scale
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype).contiguous(), torch.stack([mean.reshape(-1), scale.reshape(-1)])


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm` of x + residual, the sum rounded to their dtype.

    Args:
        x, residual: [..., width]. weight, bias: [width], or None. eps, centred: see `norm`.

    Returns:
        The normalised value, the sum, and the statistics.
    """
    total = (x + residual).contiguous()
    y, stats = norm(total, weight, bias, eps, centred)
    return y, total, stats


def norm_backward(
    grad: Tensor | None, extra: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `norm` for x, weight and bias.

    Args:
        grad: of the normalised value; None for zero.
        extra: what is added to the gradient for x; of the sum, in `add_norm`.
        x: what was normalised. stats: as `norm` gave it.

    Returns:
        Gradients for x, weight and bias; for an absent one an empty tensor.
    """
    d = torch.zeros_like(x, dtype=stats.dtype) if grad is None else wide(grad)
    mean, scale = stats.view(2, *x.shape[:-1], 1)
    normal = (wide(x) - mean) * scale
    slope = d if weight is None else d * wide(weight)
    value = slope - normal * (slope * normal).mean(-1, keepdim=True)
    value = (value - slope.mean(-1, keepdim=True) if centred else value) * scale
    value = value if extra is None else value + wide(extra)
    sums = [as_rows(t).sum(0) for t in (d * normal, d)]
    to_weight, to_bias = (_gradient_of(v, s) for v, s in zip((weight, bias), sums, strict=True))
    return value.to(x.dtype).contiguous(), to_weight, to_bias


def _gradient_of(vector: Tensor | None, total: Tensor) -> Tensor:
    return total.new_empty(0) if vector is None else total.to(vector.dtype)


def _launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Norm:
    y, _, stats = launch_forward(x, None, weight, bias, eps, centred)
    return y, stats


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> None:
    check_floats("norm", x=x, weight=weight, bias=bias)
    check_vector("norm", "weight", weight, x)
    check_vector("norm", "bias", bias, x)
    if not 0 < x.shape[-1] <= MAX_COLUMNS:
        refuse("norm", f"takes rows that are not empty and of at most {MAX_COLUMNS}, and x is {list(x.shape)}")


def _check_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> None:
    _check(x, weight, bias, eps, centred)
    check_floats("add_norm", x=x, residual=residual)
    check_same("add_norm", x, residual, "x and a residual")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, weight, bias, _, ctx.centred = inputs
    *_, x, stats = inputs[0], *output[1:]  # with a residual what was normalised is the sum
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, stats, weight, bias)


def _gradient(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    x, stats, weight, bias = ctx.saved_tensors  # once: a checkpoint gives them once
    *extra, _ = others  # of the sum, where there is one, and of the statistics
    to_x, to_weight, to_bias = OPS.norm_backward(grad, *(extra or [None]), x, stats, weight, bias, ctx.centred)
    to_weight = None if weight is None else to_weight
    return *[to_x] * len(others), to_weight, None if bias is None else to_bias, None, None


register(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor)",
    twin=norm, launch=_launch, check=_check,
)  # fmt: skip
register(
    "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    twin=add_norm, launch=launch_forward, check=_check_add,
)  # fmt: skip
register(
    "norm_backward(Tensor? grad, Tensor? extra, Tensor x, Tensor stats, Tensor? weight, Tensor? bias, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    twin=norm_backward, launch=_launch_backward,
)  # fmt: skip
differentiable("norm", _gradient, _setup)
differentiable("add_norm", _gradient, _setup)
