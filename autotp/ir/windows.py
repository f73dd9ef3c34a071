"""Windows on the segments of a dimension: the arithmetic that all slices of tensors are made of.

A dimension is `repeat` runs of segments, and a rank's share of a segment is a window on it. Numbers are ints or
`torch.SymInt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.errors import PlanError

from .sizes import dealt, largest

Size = Any  # int or torch.SymInt
Segments = Sequence[tuple[Any, ...]]  # (count, unit) each, and where units go otherwise than by `torch.chunk` how


def least(a: Size, b: Size) -> Size:
    """Return the minimum: `torch.sym_min` takes five times as long for two ints, as most sizes are."""
    return min(a, b) if type(a) is type(b) is int else torch.sym_min(a, b)


def lengths(segments: Segments) -> list[int]:
    """Return elements of each whole segment."""
    return [count * unit for count, unit, *_ in segments]


def shares(segments: Segments, rank: int, tp: int) -> list[tuple[Any, Any]]:
    """Return (start, length) in elements of `rank`'s share of each segment, for symbolic counts too."""
    out = []
    for count, unit, *deal in segments:
        start, length = dealt(count, rank, tp, *deal, least=least)
        out.append((start * unit, length * unit))
    return out


def most(segments: Segments, tp: int) -> list[Any]:
    """Return the elements of each segment in the largest of its shares."""
    return [largest(count, tp, *deal) * unit for count, unit, *deal in segments]


def even_share(repeat: int, segments: Segments, tp: int) -> int:
    """Return elements of every rank's share where one run of one segment is sharded evenly; 0 otherwise.

    All conversions of such a dimension are what they are in the general case, at a third of its cost.
    """
    count, unit, *deal = segments[0]
    if len(segments) > 1 or deal or isinstance(repeat, torch.SymInt) or isinstance(count, torch.SymInt):
        return 0
    return 0 if repeat != 1 or count % tp else count // tp * unit


def checked(x: Tensor, dim: int, repeat: int, have: Sequence[int]) -> Tensor:
    """Return `x`, whose dimension must be so many runs of these lengths.

    Args:
        x: a tensor. dim: counted from the front. repeat: runs. have: elements of each segment of a run.

    Raises:
        PlanError: the dimension has another size.
    """
    if x.shape[dim] != repeat * sum(have):
        raise PlanError(
            f"A conversion expects {repeat} x {list(have)} elements in dimension {dim} but got a tensor of shape "
            f"{tuple(x.shape)}. The plan was made for another shape, or a size in the graph was not made local."
        )
    return x


def window(x: Tensor, dim: int, repeat: int, have: Sequence[int], want: Sequence[tuple[int, int]]) -> Tensor:
    """Return a window on every segment of a dimension, with zeros where it exceeds the segment.

    Args:
        x: `dim` is `repeat` runs of segments. have: elements of each segment.
        want: (start, length) of the window on each, in elements from the segment's start, which may be negative.

    Returns: a tensor whose `dim` is `repeat` runs of these lengths.
    """
    x = checked(x, dim, repeat, have)
    if all(start == 0 and length == n for (start, length), n in zip(want, have, strict=True)):
        return x
    # Several runs get a dimension of their own meanwhile, so that every segment is cut once for all of them.
    axis = dim if repeat == 1 else dim + 1
    x = x if repeat == 1 else x.unflatten(dim, (repeat, sum(have)))
    pieces, at = [], 0
    for n, (start, length) in zip(have, want, strict=True):
        # Before the segment, inside it and after it: sizes may be symbols, so the parts are computed, not compared.
        before = -least(start, 0)
        first = start + before
        inside = least(start + length, n) - first
        after = length - before - inside
        pieces += [_zeros(x, axis, before)] if before != 0 else []
        pieces += [x.narrow(axis, at + first, inside)]
        pieces += [_zeros(x, axis, after)] if after != 0 else []
        at += n
    # A part without elements is not joined; one piece must stay where nothing has any.
    out = join([p for p in pieces if p.shape[axis] != 0] or pieces[:1], axis)
    return out if repeat == 1 else out.flatten(dim, dim + 1)


def _zeros(x: Tensor, axis: int, length: int) -> Tensor:
    return x.new_zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]))


def join(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate pieces along `axis`."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)
