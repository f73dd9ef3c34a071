"""Operators that autotp puts into graphs, registered with torch.library: they have fakes, gradients and rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WIDE = torch.float32


def class_sums(scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    """What a cross entropy needs of the scores, as sums over the classes, so that the classes may be dealt out.

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
    known = (target >= 0) & (target < scores.shape[1])
    own = torch.where(known, shifted.gather(1, torch.where(known, target, 0).unsqueeze(1)).squeeze(1), 0)
    sums = [own, shifted.sum(1)] if total else [own]
    return torch.stack([shifted.exp_().sum(1), *sums])


def class_sums_backward(grad: Tensor, scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    """The gradient of `class_sums` for the scores; the exponentials are computed again rather than kept."""
    out = _shifted(scores, most).exp_().mul_(grad[0].unsqueeze(1))
    known = (target >= 0) & (target < scores.shape[1])
    out.scatter_add_(1, torch.where(known, target, 0).unsqueeze(1), torch.where(known, grad[1], 0).unsqueeze(1))
    return (out.add_(grad[2].unsqueeze(1)) if total else out).to(scores.dtype)


def _shifted(scores: Tensor, most: Tensor) -> Tensor:
    wide = torch.promote_types(scores.dtype, WIDE)
    return scores.to(wide) - most.to(wide).unsqueeze(1)


def _sums_fake(scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    wide = torch.promote_types(scores.dtype, WIDE)
    return scores.new_empty((3 if total else 2, scores.shape[0]), dtype=wide)


def _sums_gradient_fake(grad: Tensor, scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.total = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return OPS.class_sums_backward(grad, *ctx.saved_tensors, ctx.total), None, None, None


_ENTRIES = (
    ("class_sums(Tensor scores, Tensor most, Tensor target, bool total)", class_sums, _sums_fake),
    ("class_sums_backward(Tensor grad, Tensor scores, Tensor most, Tensor target, bool total)", class_sums_backward,
     _sums_gradient_fake),
)  # fmt: skip
_LIBRARY = torch.library.Library("autotp", "FRAGMENT")
for _schema, _function, _fake in _ENTRIES:
    _LIBRARY.define(f"{_schema} -> Tensor")
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autotp::{_function.__name__}", _fake, lib=_LIBRARY)
OPS: Any = torch.ops.autotp
torch.library.register_autograd("autotp::class_sums", _backward, setup_context=_keep, lib=_LIBRARY)
