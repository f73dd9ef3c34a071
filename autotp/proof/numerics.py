"""How far apart two results are, and the loss that gives every element of a result a gradient of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.errors import PlanError
from autotp.ir.specs import Spec

PERIOD = 65537  # elements after which weights repeat: a prime, so that no two rows of a value are weighed alike
FLOOR = 1e-3  # of the operands' (or the gradients') largest value: below it a value may be zero by mathematics


def own_leaf(value: Any, wanted: bool) -> Any:
    """A tensor as a leaf of its own, whose gradient is wanted or not; anything else as it is."""
    return value.detach().clone().requires_grad_(wanted) if isinstance(value, Tensor) else value


def has_grad(value: Any) -> bool:
    """Whether a gradient has come to it."""
    return isinstance(value, Tensor) and value.grad is not None


def grad_or_zeros(value: Tensor) -> Tensor:
    """The gradient that has come to a value; zeros where none has."""
    return value.grad if value.grad is not None else torch.zeros_like(value)


def layout_error(ranks: Sequence[Tensor], spec: Spec, whole: Tensor, scale: float = 0.0) -> float:
    """Relative error of the recombined value; for whole layouts the worst rank counts."""
    ranks = [v.detach() for v in ranks]
    try:
        values = ranks if spec.whole else [spec.recombine(ranks)]
    except (RuntimeError, ValueError, IndexError, PlanError):  # shapes that do not fit
        return float("inf")
    return max(relative(f, whole, scale) for f in values)


def relative(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """max|a - b| over max|b| + a thousandth of `scale`; inf where shapes, integers or non-finite values differ.

    Args:
        a: what is judged. b: what it should be, of the same shape.
        scale: the largest of what `b` is made of: a sum of large numbers may be zero but for their rounding.
    """
    if a.shape != b.shape:
        return float("inf")
    a, b = _dense(a), _dense(b)
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    if b.itemsize == 1:
        a, b = a.double(), b.double()
    if torch.equal(a, b):
        return 0.0
    top = (a - b).abs().max().item() if a.numel() else 0.0
    top = top if math.isfinite(top) else _finite_part(a, b)
    size = largest(b) + FLOOR * scale
    if size:
        return top / size
    return math.inf if top else 0.0


def _dense(value: Tensor) -> Tensor:
    """A sparse value, such as a buffer may hold, with its zeros: few operators take it as it is."""
    return value if value.layout == torch.strided else value.to_dense()


def _finite_part(a: Tensor, b: Tensor) -> float:
    """max|a - b| where `b` is finite; inf where the non-finite values differ."""
    finite = torch.isfinite(b)
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    top = (a[finite] - b[finite]).abs().max().item() if finite.any() else 0.0
    return math.inf if math.isnan(top) else top  # a NaN would be lost in max()


def loss(outputs: Any) -> Tensor:
    """A fixed linear functional of all floating outputs (and buffers written)."""
    total = torch.zeros((), dtype=torch.float64)
    for v in compat.tree_leaves(outputs):
        if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) and v.numel():
            total = total + weighted(v, weights(v))
    return total


def weights(value: Tensor) -> Tensor:
    """Weights of the elements of a whole value in `loss`, as the value is laid out; real and imaginary parts apart."""
    shape = torch.view_as_real(value).shape if value.is_complex() else value.shape
    count = shape.numel()
    pattern = torch.cos(torch.arange(min(count, PERIOD), dtype=torch.float64, device=value.device) + 0.5)
    return pattern.repeat(-(-count // PERIOD))[:count].reshape(shape) if count > PERIOD else pattern.reshape(shape)


def weighted(value: Tensor, weight: Tensor) -> Tensor:
    """The sum of a value's finite elements times these weights."""
    plain = torch.view_as_real(value) if value.is_complex() else value
    return (torch.where(torch.isfinite(plain), plain, 0) * weight).sum()


NO_DERIVATIVE = re.compile(r"no autograd formula was registered|derivative for .* is not implemented")


def backward(total: Tensor) -> str:
    """Fill the gradients of what the value was made of; where an operator has no derivative, what torch says of it."""
    try:
        if total.requires_grad:
            total.backward()
    except RuntimeError as e:
        if not NO_DERIVATIVE.search(str(e)):
            raise
        return str(e).splitlines()[0]
    return ""


def largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    x = _dense(x.detach())
    if x.dtype == torch.bool or not x.numel():
        return 0.0
    x = x.double() if x.itemsize == 1 else x  # float8 has no arithmetic
    top = x.abs().max().item()
    return top if math.isfinite(top) else torch.where(torch.isfinite(x), x, 0).abs().max().item()
