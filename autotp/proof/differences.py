"""Comparison of two runs, value by value, and a loss that gives each element of a result its own gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from autotp import compat
from autotp.errors import PlanError
from autotp.ir.specs import Spec
from autotp.text import first_line

PERIOD = 65537  # elements after which weights repeat: a prime, so that no two rows of a value are weighed alike
FLOOR = 1e-3  # of the operands' (or the gradients') largest value: below it a value may be zero by mathematics
COMPARED_TYPES = (Tensor, bool, int, float, complex, str, type(None))  # values that tell whether they are equal


Key = TypeVar("Key")


@dataclass(frozen=True)
class Gap(Generic[Key]):
    """A value that differs from its reference.

    Attributes:
        key: of the value. error: by how much, as a part of the largest; inf where no number says it.
    """

    key: Key
    error: float


@dataclass(frozen=True)
class Parts:
    """A value as ranks have it.

    Attributes:
        ranks: the part of each; of one rank alone, its part. spec: the layout of the value over them.
        place: of one rank alone, its number and the number of ranks.
    """

    ranks: Sequence[Any]
    spec: Spec
    place: tuple[int, int] | None = None

    def joined(self) -> list[Any] | None:
        """Return the whole of each rank, or the one that the parts make up; None where the parts do not fit."""
        if self.spec.whole:
            return list(self.ranks)
        try:
            return [self.spec.recombine([x.detach() for x in self.ranks])]
        except (RuntimeError, ValueError, IndexError, PlanError):
            return None


@dataclass
class Rounding:
    """An allowance for rounding.

    Attributes:
        allowed: of an error. scale: the largest of what a value is made of, by its key, where its own size is too small
            a measure: a sum of large numbers may be zero but for their rounding.
        compared: how many values were. worst: the largest error of these.
    """

    allowed: float
    scale: float | Callable[[Any], float] = 0.0
    compared: int = 0
    worst: float = 0.0

    def error(self, ours: Tensor, theirs: Tensor, scale: float) -> float:
        """Return how far a tensor is off."""
        return relative(ours, theirs, scale)

    def judge(self, key: Any, ours: Any, theirs: Any) -> float:
        """Return how far a value of any kind is off."""
        if not callable(self.scale):
            return self._off(ours, theirs, self.scale)
        error = self._off(ours, theirs, 0.0)
        return error if error <= self.allowed else self._off(ours, theirs, self.scale(key))

    def _off(self, ours: Any, theirs: Any, scale: float) -> float:
        if isinstance(ours, Parts):
            if ours.place is not None:
                (value,) = ours.ranks
                return self._off(ours.spec.owned(value, *ours.place), ours.spec.take(theirs, *ours.place), scale)
            values = ours.joined()
            return max((self._off(x, theirs, scale) for x in values or ()), default=math.inf)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return self.error(ours.detach(), theirs.detach(), scale)
        if isinstance(ours, COMPARED_TYPES) and isinstance(theirs, COMPARED_TYPES):
            return 0.0 if type(ours) is type(theirs) and ours == theirs else math.inf
        return 0.0


def differences(ours: Mapping[Key, Any], theirs: Mapping[Key, Any], rounding: Rounding) -> Gap[Key] | None:
    """Find the first value of ours that is not theirs.

    Args:
        ours: values by key, in the order in which they are judged: tensors, `Parts` of ranks, or plain objects.
        theirs: what they should be; None stands for what one of both lacks.
        rounding: what is allowed, which also counts what was compared.
    """
    for key in (*ours, *(k for k in theirs if k not in ours)):
        error = rounding.judge(key, ours.get(key), theirs.get(key))
        rounding.compared, rounding.worst = rounding.compared + 1, max(rounding.worst, error)
        if not error <= rounding.allowed:
            return Gap(key, error)
    return None


def own_leaf(value: Any, wanted: bool) -> Any:
    """Make a tensor a leaf of its own, whose gradient is wanted or not; leave anything else as it is."""
    return value.detach().clone().requires_grad_(wanted) if isinstance(value, Tensor) else value


def has_grad(value: Any) -> bool:
    """Return whether a value has a gradient."""
    return isinstance(value, Tensor) and (value.is_leaf or value.retains_grad) and value.grad is not None


def grad_or_zeros(value: Tensor) -> Tensor:
    """Return the gradient of a value; zeros where it has none, which take no memory and cannot be written to."""
    return value.new_zeros(()).expand_as(value) if value.grad is None else value.grad


def relative(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """Return max|a - b| over max|b| + `FLOOR * scale`; inf where shapes, kinds, integers or non-finite values differ.

    Args:
        a: what is judged. b: what it should be, of the same shape.
        scale: the largest of what `b` is made of: a sum of large numbers may be zero but for their rounding.
    """
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return float("inf")
    a, b = _dense(a), _dense(b)
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    if b.itemsize == 1:
        a, b = a.double(), b.double()
    if torch.equal(a, b):
        return 0.0
    if b.is_floating_point() and b.itemsize < 4:  # in which the difference would be rounded
        a, b = a.float(), b.float()
    top = (a - b).abs().max().item() if a.numel() else 0.0
    top = top if math.isfinite(top) else _finite_part(a, b)
    size = largest(b) + FLOOR * scale
    if size:
        return top / size
    return math.inf if top else 0.0


def _dense(value: Tensor) -> Tensor:
    """Return a sparse value, such as a buffer may hold, with its zeros: few operators take it as it is."""
    return value if value.layout == torch.strided else value.to_dense()


def _finite_part(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| where `b` is finite; inf where the non-finite values differ."""
    finite = torch.isfinite(b)
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    top = (a[finite] - b[finite]).abs().max().item() if finite.any() else 0.0
    return math.inf if math.isnan(top) else top  # a NaN would be lost in max()


def loss(outputs: Any) -> Tensor:
    """Return a fixed linear functional of all floating outputs (and buffers written)."""
    total = torch.zeros((), dtype=torch.float64)
    for v in compat.tree_leaves(outputs):
        if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) and v.numel():
            total = total + weighted(v, weights(v))
    return total


def weights(value: Tensor) -> Tensor:
    """Return the weights of a whole value's elements in `loss`, in the value's shape; complex ones have two each."""
    shape = torch.view_as_real(value).shape if value.is_complex() else value.shape
    count = shape.numel()
    pattern = torch.cos(torch.arange(min(count, PERIOD), dtype=torch.float64, device=value.device) + 0.5)
    return pattern.repeat(-(-count // PERIOD))[:count].reshape(shape)


def weighted(value: Tensor, weight: Tensor) -> Tensor:
    """Sum a value's finite elements times these weights."""
    plain = torch.view_as_real(value) if value.is_complex() else value
    return (torch.where(torch.isfinite(plain), plain, 0) * weight).sum()


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative difference that rounding may make, in the least exact of these dtypes."""
    factors = {1: 16, 2: 16}  # by bytes
    return max((factors.get(d.itemsize, 1e3) * torch.finfo(d).eps for d in dtypes), default=1e-3)


NO_DERIVATIVE = re.compile(r"no autograd formula was registered|derivative for .* is not implemented")


def backward(total: Tensor) -> str:
    """Fill the gradients of the leaves of a value; return torch's message where an operator has no derivative."""
    try:
        if total.requires_grad:
            total.backward()
    except RuntimeError as e:
        if not NO_DERIVATIVE.search(str(e)):
            raise
        return first_line(e)
    return ""


def gradients(
    results: Sequence[Tensor], toward: Sequence[Tensor | None], operands: Sequence[Tensor]
) -> list[Tensor | None]:
    """Compute the gradients of the operands; None for those that need none or are not reached.

    Args:
        results: of the operands. toward: gradients of the results; None, or fewer of them, for those that have none.
    """
    # An argmax has no gradient.
    pairs = [(y, g) for y, g in zip(results, toward, strict=False) if g is not None and y.requires_grad]
    sources = [x for x in operands if x.requires_grad]
    if not pairs or not sources:  # torch refuses to compute a gradient of nothing
        return [None] * len(operands)
    outputs, upstream = zip(*pairs, strict=True)
    with compat.own_convolutions(operands):
        computed = iter(torch.autograd.grad(outputs, sources, upstream, allow_unused=True))
    grads = []
    for x in operands:
        grads.append(next(computed) if x.requires_grad else None)
    return grads


def largest(x: Tensor) -> float:
    """Return the largest finite magnitude."""
    x = _dense(x.detach())
    if x.dtype == torch.bool or not x.numel():
        return 0.0
    x = x.double() if x.itemsize == 1 else x  # float8 has no arithmetic
    top = x.abs().max().item()
    return top if math.isfinite(top) else torch.where(torch.isfinite(x), x, 0).abs().max().item()
