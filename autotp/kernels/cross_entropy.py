"""Cross entropy over the classes that a rank has, from terms of the scores that one pass over them gives.

`autotp::class_terms` gives for each example the largest of this rank's scores, the sum of exponentials by that, and the
target's score. From the maximum over the ranks `autotp::class_sums_of` makes what `autotp::class_sums` gives, out of a
few numbers an example: the running sum of Milakov and Gimelshein 2018, over blocks of classes and then over ranks. The
gradient is `autotp::class_terms_backward`: it reads the scores a second time and writes their gradient. No pass
writes a copy of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotp.ir.op import dtype_name

from .common import DTYPES, WIDE, derived, jit, refuse, register, tl
from .operators import class_sums_backward
from .tiles import empty_like, loaded, power_of_two, row_and_columns, tiles, wide

TILE = 4096  # classes that a program reads at a time
WARPS = 8
EXAMPLES = 256  # whose sums a program takes by another pivot


@jit
def _terms(scores, target, out, examples, classes, row_step, step, TOTAL: tl.constexpr, TILE: tl.constexpr):
    """Compute the terms of one example, whose classes are read once, from the left to the right."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_step
    most, pivot, total, parts = -float("inf"), 0.0, 0.0, 0.0
    for start in range(0, classes, TILE):
        column = (start + tl.arange(0, TILE)).to(tl.int64)
        inside = column < classes
        x = tl.load(scores + column * step, mask=inside, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, tl.max(x, 0))
        # What was summed by the maximum until now is scaled to that of this tile: the online softmax.
        new = tl.where(most == -float("inf"), 0.0, most)  # of nothing but -inf the exponentials are 0, not nan
        parts = parts * tl.exp(pivot - new) + tl.sum(tl.exp(x - new), 0)
        if TOTAL:
            total += start * (pivot - new) + tl.sum(tl.where(inside, x - new, 0.0), 0)
        pivot = new
    label = tl.load(target + row)
    in_range = (label >= 0) & (label < classes)
    score = loaded(scores + tl.where(in_range, label, 0).to(tl.int64) * step, in_range)
    tl.store(out + row, most)
    tl.store(out + examples + row, parts)
    tl.store(out + 2 * examples + row, score)
    if TOTAL:
        tl.store(out + 3 * examples + row, total)


@jit
def _sums(terms, most, target, out, examples, classes, TOTAL: tl.constexpr, TILE: tl.constexpr):
    """Convert the sums of an example, a few numbers, to another pivot."""
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = row < examples
    local = tl.load(terms + row, mask=inside, other=0)
    by = loaded(most + row, inside)
    up = tl.where(local == -float("inf"), 0.0, local) - by
    label = tl.load(target + row, mask=inside, other=-1)
    score = tl.load(terms + 2 * examples + row, mask=inside, other=0)
    tl.store(out + row, tl.load(terms + examples + row, mask=inside, other=0) * tl.exp(up), mask=inside)
    tl.store(out + examples + row, tl.where((label >= 0) & (label < classes), score - by, 0.0), mask=inside)
    if TOTAL:
        total = tl.load(terms + 3 * examples + row, mask=inside, other=0)
        tl.store(out + 2 * examples + row, total + classes * up, mask=inside)


@jit
def _gradients(
    grad, scores, most, target, out, examples, classes, row_step, step, TOTAL: tl.constexpr, TILE: tl.constexpr
):
    row, column = row_and_columns(classes, TILE)
    column = column.to(tl.int64)
    inside = column < classes
    x = loaded(scores + row * row_step + column * step, inside)
    gradient = tl.exp(x - tl.load(most + row).to(tl.float32)) * tl.load(grad + row)
    gradient += tl.where(column == tl.load(target + row), tl.load(grad + examples + row), 0.0)
    if TOTAL:
        gradient += tl.load(grad + 2 * examples + row)
    tl.store(out + row * classes + column, gradient, mask=inside)


def _launch_terms(scores: Tensor, target: Tensor, total: bool) -> Tensor:
    if scores.dtype not in DTYPES:
        return class_terms(scores, target, total)
    examples, classes = scores.shape
    out = torch.empty((4 if total else 3, examples), dtype=WIDE, device=scores.device)
    if examples:
        tile = power_of_two(classes, TILE)
        arguments = scores, target.contiguous(), out, examples, classes, *scores.stride()
        _terms[(examples,)](*arguments, TOTAL=total, TILE=tile, num_warps=WARPS)
    return out


def _launch_sums_of(scores: Tensor, most: Tensor, target: Tensor, terms: Tensor, total: bool) -> Tensor:
    if terms.dtype != WIDE:
        return class_sums_of(scores, most, target, terms, total)
    examples, classes = scores.shape
    out = torch.empty((3 if total else 2, examples), dtype=WIDE, device=scores.device)
    if examples:
        arguments = terms.contiguous(), most.contiguous(), target.contiguous(), out, examples, classes
        _sums[(tiles(examples, EXAMPLES),)](*arguments, TOTAL=total, TILE=EXAMPLES)
    return out


def _launch_backward(grad: Tensor, scores: Tensor, most: Tensor, target: Tensor, total: bool) -> Tensor:
    if scores.dtype not in DTYPES:
        return class_sums_backward(grad, scores, most, target, total)
    examples, classes = scores.shape
    out = empty_like(scores)
    if out.numel():
        tile = power_of_two(classes, TILE)
        arguments = grad.to(WIDE).contiguous(), scores, most.contiguous(), target.contiguous(), out
        grid = (examples * tiles(classes, tile),)
        _gradients[grid](*arguments, examples, classes, *scores.stride(), TOTAL=total, TILE=tile, num_warps=WARPS)
    return out


def class_terms(scores: Tensor, target: Tensor, total: bool) -> Tensor:
    """Compute the terms of `class_sums`, relative to the largest of the scores that are here.

    Args:
        scores: of every example for the classes that are here, [examples, classes].
        target: the class of every example, [examples]; one that is not here has the score 0.
        total: give the fourth row too.

    Returns:
        [3 or 4, examples], in float32 at least: the largest score; the sum of exp(score - pivot), the pivot being that
        score, or 0 where it is -inf; the target's score; the sum of all score - pivot.
    """
    x = wide(scores)
    most = x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -torch.inf)
    shifted = x - _pivot(most).unsqueeze(1)
    in_range = (target >= 0) & (target < x.shape[1])
    score = x.gather(1, torch.where(in_range, target, 0).unsqueeze(1)).squeeze(1) if x.shape[1] else most
    rows = [most, shifted.exp().sum(1), torch.where(in_range, score, 0)]
    return torch.stack([*rows, shifted.sum(1)] if total else rows)


def class_sums_of(scores: Tensor, most: Tensor, target: Tensor, terms: Tensor, total: bool) -> Tensor:
    """Compute `class_sums` from the terms of its scores, without reading these: see there, and `class_terms`."""
    in_range = (target >= 0) & (target < scores.shape[1])
    up = _pivot(terms[0]) - most
    rows = [terms[1] * up.exp(), torch.where(in_range, terms[2] - most, 0)]
    return torch.stack([*rows, terms[3] + scores.shape[1] * up] if total else rows)


def _pivot(most: Tensor) -> Tensor:
    return torch.where(most == -torch.inf, 0, most)


def _check(scores: Tensor, target: Tensor, total: bool) -> None:
    if not scores.is_floating_point() or scores.ndim != 2:
        refuse("class_terms", f"takes floating scores of two dimensions, and these are {list(scores.shape)}")
    if target.is_floating_point() or target.shape != scores.shape[:1] or target.device != scores.device:
        what = f"{list(target.shape)} in {dtype_name(target.dtype)} on {target.device}"
        refuse(
            "class_terms",
            f"takes a whole number for each of {scores.shape[0]} examples on {scores.device}, not {what}",
        )


register(
    "class_terms(Tensor scores, Tensor target, bool total) -> Tensor",
    twin=class_terms, launch=_launch_terms, check=_check,
)  # fmt: skip
register(
    "class_sums_of(Tensor scores, Tensor most, Tensor target, Tensor terms, bool total) -> Tensor",
    twin=class_sums_of, launch=_launch_sums_of,
)  # fmt: skip
derived("class_sums_of", "class_terms_backward", (0, 1, 2), (4,))
register(
    "class_terms_backward(Tensor grad, Tensor scores, Tensor most, Tensor target, bool total) -> Tensor",
    twin=class_sums_backward, launch=_launch_backward,
)  # fmt: skip
