"""LayerNorm and RMSNorm, with a residual added before where there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import norm_triton
from .common import (
    WIDE,
    as_rows,
    check_floats,
    check_same,
    check_vector,
    differentiable,
    empty_like,
    refuse,
    register,
    wide,
)

OPS: Any = torch.ops.autotp
Norm = tuple[Tensor, Tensor]


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
    """The gradients of `norm` for x, weight and bias.

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
    y, _, stats = norm_triton.forward(x, None, weight, bias, eps, centred)
    return y, stats


def _launch_backward(
    grad: Tensor | None, extra: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad = torch.zeros_like(x) if grad is None else grad
    to_x, sums = norm_triton.backward(grad, extra, x, stats, weight, bias is not None, centred)
    to_weight = _gradient_of(weight, stats if weight is None else sums[0])
    to_bias = _gradient_of(bias, stats if bias is None else sums[1])
    return to_x, to_weight, to_bias


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> None:
    check_floats("norm", x=x, weight=weight, bias=bias)
    check_vector("norm", "weight", weight, x)
    check_vector("norm", "bias", bias, x)
    if x.shape[-1] == 0:
        refuse("norm", f"takes rows that are not empty, and x is {list(x.shape)}")


def _check_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> None:
    _check(x, weight, bias, eps, centred)
    check_floats("add_norm", x=x, residual=residual)
    check_same("add_norm", x, residual, "x and a residual")


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Norm:
    return empty_like(x), x.new_empty((2, x.shape[:-1].numel()), dtype=WIDE)


def _fake_add(x: Tensor, residual: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, stats = _fake(x, *options)
    return y, empty_like(x), stats


def _fake_backward(
    grad: Any, extra: Any, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    to_weight = stats.new_empty(0) if weight is None else empty_like(weight)
    to_bias = stats.new_empty(0) if bias is None else empty_like(bias)
    return empty_like(x), to_weight, to_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Norm) -> None:
    x, weight, bias, _, ctx.centred = inputs
    _keep(ctx, x, output[1], weight, bias)


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, bias, _, ctx.centred = inputs
    _keep(ctx, output[1], output[2], weight, bias)


def _keep(ctx: Any, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, stats, weight, bias)


def _gradients(ctx: Any, grad: Tensor | None, extra: Tensor | None) -> tuple[Any, ...]:
    x, stats, weight, bias = ctx.saved_tensors  # once: a checkpoint gives them once
    to_x, to_weight, to_bias = OPS.norm_backward(grad, extra, x, stats, weight, bias, ctx.centred)
    to_weight = None if weight is None else to_weight
    return to_x, to_weight, None if bias is None else to_bias


def _gradient(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    return *_gradients(ctx, grad, None), None, None


def _gradient_add(ctx: Any, grad: Tensor | None, extra: Tensor | None, _: Any) -> tuple[Any, ...]:
    to_x, *vectors = _gradients(ctx, grad, extra)
    return to_x, to_x, *vectors, None, None


register(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor)",
    twin=norm, launch=_launch, fake=_fake, check=_check,
)  # fmt: skip
register(
    "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    twin=add_norm, launch=norm_triton.forward, fake=_fake_add, check=_check_add,
)  # fmt: skip
register(
    "norm_backward(Tensor? grad, Tensor? extra, Tensor x, Tensor stats, Tensor? weight, Tensor? bias, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    twin=norm_backward, launch=_launch_backward, fake=_fake_backward,
)  # fmt: skip
differentiable("norm", _gradient, _setup)
differentiable("add_norm", _gradient_add, _setup_add)
