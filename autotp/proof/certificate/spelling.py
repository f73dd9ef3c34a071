"""Operators as the torch functions under which the checker's table of linear operators knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.ir.op import aten
from autotp.plans.export.styles import spmd_types

from .linear import type_by_rule

Summand = Callable[[Tensor], Tensor]  # takes a product that is planned to be a summand, and has the checker say so


def _dims(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator whose dimensions may be left out, as the checker's function takes them."""

    def call(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        return function(x, dtype=dtype) if dim is None or dim == [] else function(x, dim, keepdim, dtype=dtype)

    return call


def _minus(x: Any, other: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(other, x, alpha=alpha) if isinstance(other, Tensor) else torch.add(torch.neg(x) * alpha, other)


# Where the checker's function takes the operator's own arguments: torch's of the same name, a method, another.
FUNCTIONS = (
    "add sub subtract neg negative clone detach cumsum cat stack reshape transpose t permute flatten unflatten squeeze "
    "unsqueeze select narrow index_select gather split chunk unbind flip roll movedim diagonal mul mm bmm matmul dot mv"
)
METHODS = "view_as expand_as repeat unfold"
SAME: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name): getattr(torch, name) for name in FUNCTIONS.split()},
    **{getattr(aten, name): getattr(torch.Tensor, name) for name in METHODS.split()},
    aten.concat: torch.cat,
    aten.view: torch.reshape,
    aten._unsafe_view: torch.reshape,
    aten.split_with_sizes: torch.split,
    aten.multiply: torch.mul,
}
# Where its arguments are others.
TURNED: dict[Any, Callable[..., Any]] = {
    aten.sum: _dims(torch.sum),
    aten.mean: _dims(torch.mean),
    aten.alias: lambda x: x.view_as(x),
    aten.contiguous: lambda x, memory_format=torch.contiguous_format: torch.clone(x),
    aten.expand: lambda x, size, implicit=False: torch.Tensor.expand(x, size),
    aten.rsub: _minus,
    aten.einsum: lambda equation, operands, path=None: torch.einsum(equation, *operands),
}
QUOTIENTS = {aten.div, aten.divide, aten.true_divide}


def _linear(summand: Summand, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = summand(torch.matmul(x, torch.transpose(weight, 0, -1)))
    return product if bias is None else torch.add(product, bias)


def _with_matrix(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(summand: Summand, added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        matrix = summand(product(a, b))
        return torch.add(torch.mul(added, beta) if beta != 1 else added, matrix, alpha=alpha)

    return call


def _convolution(target: Any) -> Callable[..., Tensor]:
    """A convolution: the checker has no function for it, so its einsum rule says that it is linear in either."""

    def call(summand: Summand, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        with spmd_types().no_typecheck():
            result = target(x, weight, None, *rest)
        type_by_rule([x, weight], ((0,), (1,)), result)
        product = summand(result)
        if bias is None:
            return product
        return torch.add(product, torch.reshape(bias, [-1, *[1] * (weight.ndim - 2)]))

    return call


# A product and what is added to it, which is added once: the product is asserted before.
SUMS: dict[Any, Callable[..., Any]] = {
    aten.linear: _linear,
    aten.addmm: _with_matrix(torch.mm),
    aten.baddbmm: _with_matrix(torch.bmm),
}
_CONVOLUTIONS = "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"
CONVOLUTIONS = {getattr(aten, name) for name in _CONVOLUTIONS}


def spelled(target: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any] | None, bool]:
    """The torch function for an operator, or None, and whether that takes a `Summand` first.

    Args:
        target: of the call. kwargs: its arguments by name. Nothing that rounds is linear, though the checker has
            `torch.div` with a `rounding_mode` in its table.
    """
    packet = getattr(target, "overloadpacket", None)
    if packet in CONVOLUTIONS:
        return _convolution(target), True
    if packet in SUMS:
        return SUMS[packet], True
    rounded = kwargs.get("rounding_mode") is not None or not _real(kwargs.get("dtype"))
    if rounded:
        return None, False
    if packet in QUOTIENTS:
        return torch.div, False
    return SAME.get(packet, TURNED.get(packet)), False


def _real(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point or dtype.is_complex
