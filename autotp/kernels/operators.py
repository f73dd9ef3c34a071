"""Operators that autotp puts into graphs, registered with torch.library: they have fakes, gradients and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .common import LIBRARY, OPS, WIDE, derived, differentiable, enter
from .tiles import empty_like

GOLDEN = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as int64


def class_sums(scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    """Compute the sums over the classes that a cross entropy is made of, so that the classes may be sharded.

    The loss of an example is the logarithm of the first sum less the second one; adding its maximum to both changes
    nothing (Shoeybi et al. 2019, section 3).

    Args:
        scores: of every example for every class, [examples, classes].
        most: a number for each example, subtracted so that nothing overflows: the largest of its scores, [examples].
        target: the class of every example, [examples]; one that is no class gives 0 for the second sum.
        total: give the third sum too.

    Returns:
        [2 or 3, examples], in float32 at least: the sum of exp(score - most); the target's score - most; the sum of all
        score - most.
    """
    shifted = _shifted(scores, most)
    in_range = (target >= 0) & (target < scores.shape[1])
    score = torch.where(in_range, shifted.gather(1, torch.where(in_range, target, 0).unsqueeze(1)).squeeze(1), 0)
    sums = [score, shifted.sum(1)] if total else [score]
    return torch.stack([shifted.exp_().sum(1), *sums])


def class_sums_backward(grad: Tensor, scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    """Compute the gradient of `class_sums` for the scores; the exponentials are computed again rather than kept."""
    out = _shifted(scores, most).exp_().mul_(grad[0].unsqueeze(1))
    in_range = (target >= 0) & (target < scores.shape[1])
    out.scatter_add_(1, torch.where(in_range, target, 0).unsqueeze(1), torch.where(in_range, grad[1], 0).unsqueeze(1))
    return (out.add_(grad[2].unsqueeze(1)) if total else out).to(scores.dtype).contiguous()


def _shifted(scores: Tensor, most: Tensor) -> Tensor:
    wide = torch.promote_types(scores.dtype, WIDE)
    return scores.to(wide) - most.to(wide).unsqueeze(1)


def checked_classes(target: Tensor, classes: int, ignored: int) -> Tensor:
    """Check that all are classes, or to be ignored, and return them: on CUDA by an assertion on the device.

    Args:
        target: classes, of any shape. classes: how many there are. ignored: a number that is no class and allowed.

    Raises:
        IndexError: one is none, in the words of torch's own loss.
    """
    bad = ((target < 0) | (target >= classes)) & (target != ignored)
    if target.device.type == "cuda":
        torch.ops.aten._assert_async.msg(~bad.any(), f"Target out of bounds: classes are 0 to {classes - 1}.")
    elif bool(bad.any()):
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")
    return target.clone()


def _checked_fake(target: Tensor, classes: int, ignored: int) -> Tensor:
    return torch.empty_like(target)


def counter_uniform(
    size: Sequence[int], seed: Tensor, place: Tensor | None, dim: int, whole: Sequence[int], dtype: torch.dtype,
    other: Tensor | None = None, other_dim: int = 0,
) -> Tensor:  # fmt: skip
    """Draw uniform numbers in [0, 1), each from its seed and index in the whole value: a rank can draw any part.

    The index is mixed by SplitMix64 (Steele, Lea and Flood 2014); the upper bits are the number: 24, for float64 53.

    Args:
        size: of the part. seed: one int64, []. whole: size of the whole value.
        place: coordinates in the whole of what the part has along `dim`, [size[dim]]; None where it has all.
        dtype: of the result.
        other, other_dim: likewise of a second dimension, where two axes of a mesh each shard one.
    """
    places = {other_dim: other, dim: place} if other is not None else {dim: place}
    index, stride = torch.zeros((), dtype=torch.int64, device=seed.device), 1
    for d in reversed(range(len(size))):
        here = places.get(d)
        here = torch.arange(size[d], device=seed.device) if here is None else here
        index = index + (here * stride).view(-1, *[1] * (len(size) - d - 1))
        stride = stride * whole[d]
    bits = 53 if dtype == torch.float64 else 24
    integers = mixed(index + seed * GOLDEN).bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)
    return (integers.to(torch.float64 if bits == 53 else WIDE) * 2.0**-bits).to(dtype).expand(list(size))


def mixed(index: Tensor) -> Tensor:
    """Compute SplitMix64's output for these states: int64 arithmetic wraps around, as unsigned does."""
    x = index * GOLDEN
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _logical_shift(x, shift)) * factor
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def counter_dropout(
    x: Tensor, seed: Tensor, place: Tensor | None, dim: int, whole: Sequence[int], p: float,
    other: Tensor | None = None, other_dim: int = 0,
) -> Tensor:  # fmt: skip
    """Apply dropout with the mask `counter_uniform` >= p, which does not depend on the rank; see there.

    Args:
        x: the part. p: the chance that an element is dropped. seed, place, dim, whole, other, other_dim: see there.

    Its gradient is the same operator on the gradient: the mask is drawn again, nothing is kept but the seed.
    """
    if p >= 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    keep = counter_uniform(x.shape, seed, place, dim, whole, WIDE, other, other_dim) >= p
    return torch.where(keep, x / (1 - p), 0).contiguous()


def _uniform_fake(size: Any, seed: Tensor, place: Any, dim: int, whole: Any, dtype: torch.dtype, *_: Any) -> Tensor:
    return seed.new_empty(size, dtype=dtype)


def _dropout_fake(x: Tensor, *_: Any) -> Tensor:
    return empty_like(x)


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, place, ctx.dim, ctx.whole, ctx.p, other, ctx.other_dim = inputs
    ctx.save_for_backward(seed, place, other)


def differentiable_dropout(name: str) -> None:
    """Give a dropout its gradient: the same operator on the gradient, which drops the same elements."""

    def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        seed, place, other = ctx.saved_tensors
        arguments = seed, place, ctx.dim, ctx.whole, ctx.p, other, ctx.other_dim
        return getattr(OPS, name)(grad, *arguments), *[None] * len(arguments)

    differentiable(name, gradient, _keep_seed)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply torch's batch norm in training, writing to no operand.

    Args:
        x: [examples, channels, ...]. weight, bias: [channels]. mean, variance: running statistics before, [channels].
        momentum: the part of the batch's own in the next ones. eps: added to variances. cudnn: use it where it can be.

    Returns: the normalised x, and the running statistics after.
    """
    mean, variance = mean.clone(), variance.clone()
    return torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, cudnn), mean, variance


OTHER = ", Tensor? other=None, int other_dim=0"  # in schemas
_ENTRIES = (
    ("class_sums(Tensor scores, Tensor most, Tensor target, bool total)", class_sums, None),
    ("class_sums_backward(Tensor grad, Tensor scores, Tensor most, Tensor target, bool total)", class_sums_backward,
     None),
    ("checked_classes(Tensor target, SymInt classes, SymInt ignored)", checked_classes, _checked_fake),
    (f"counter_uniform(SymInt[] size, Tensor seed, Tensor? place, int dim, SymInt[] whole, ScalarType dtype{OTHER})",
     counter_uniform, _uniform_fake),
    (f"counter_dropout(Tensor x, Tensor seed, Tensor? place, int dim, SymInt[] whole, float p{OTHER})", counter_dropout,
     _dropout_fake),
)  # fmt: skip
for _schema, _function, _fake in _ENTRIES:
    enter(f"{_schema} -> Tensor", _function, _fake)
LIBRARY.define(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, "
    "float eps, bool cudnn_enabled) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("batch_norm", batch_norm, "CompositeImplicitAutograd")
derived("class_sums", "class_sums_backward", (0, 1, 2), (3,))
differentiable_dropout("counter_dropout")
