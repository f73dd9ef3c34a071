"""One rank's slices of a tensor whose dimension is dealt over `tp` ranks: cutting, padding, joining.

A run-time layout `spec` is `("I",)`, `("R",)`, `("P", reduction)`, `("S", dim, repeat, ((count, unit), ...))` or
`("G", dim, ends, ((count, unit),))` with the tensor of ends; the numbers are those of
`layouts.Partition` as ints or `torch.SymInt`. Everything here is one idea: the dimension is
`repeat` runs of segments, and a rank's share of a segment is a window on it. Uneven shares are padded **per segment**
to the largest share, rank 0's. As `torch.chunk` leaves only trailing shares short, padding then sits at the end of
each joined segment, and the even algorithm followed by one cut serves the uneven case too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from autotp.errors import PlanError
from autotp.ir.layouts import Grouped, Groups, Invariant, Layout, Partial, Partition, Replicate, Segment, Shard

Spec = tuple[Any, ...]


def to_runtime(layout: Layout, size: Callable[[Any], Any] = lambda s: s) -> Spec:
    """`layout` as a plain tuple, each of its sizes mapped by `size` (to an int, or to the fx.Node that computes it).

    `size` maps the name of groups' ends, too.
    """
    if isinstance(layout, Shard):
        p = layout.partition
        return "S", layout.dim, size(p.repeat), tuple((size(s.count), size(s.unit)) for s in p.segments)
    if isinstance(layout, Grouped):
        groups = layout.partition
        return "G", layout.dim, size(groups.ends), tuple((size(s.count), size(s.unit)) for s in groups.of.segments)
    if isinstance(layout, Partial):
        return "P", layout.reduction
    return ("I",) if isinstance(layout, Invariant) else ("R",)


def from_runtime(spec: Spec) -> Layout:
    """The inverse of `to_runtime` for a spec of ints."""
    if spec[0] == "S":
        return Shard(spec[1], Partition(tuple(Segment(count, unit) for count, unit in spec[3]), spec[2]))
    if spec[0] == "G":
        return Grouped(spec[1], Groups(spec[2], Partition(tuple(Segment(count, unit) for count, unit in spec[3]))))
    if spec[0] == "P":
        return Partial(spec[1])
    return Invariant() if spec[0] == "I" else Replicate()


def local_size(repeat: int, segments: Sequence[tuple[int, int]], *, rank: int, tp: int) -> int:
    """Elements of a dealt dimension that `rank` owns. Ints may be `torch.SymInt`."""
    return repeat * sum(length for _, length in _shares(segments, rank, tp))


def take(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """The slice that `rank` owns of the whole `x`."""
    _, dim, repeat, segments = spec
    return _window(x, dim, repeat, _whole(segments), _shares(segments, rank, tp)).contiguous()


def mask(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """All rows of `x` in their places, zeros for those of groups that `rank` does not own."""
    _, dim, ends, segments = spec
    ((start, length),) = _shares(segments, rank, tp)
    bounds = torch.cat([ends.new_zeros(1), ends])
    rows = torch.arange(x.shape[dim], device=x.device)
    mine = (rows >= bounds[start]) & (rows < bounds[start + length])
    return torch.where(mine.view(-1, *[1] * (x.ndim - dim - 1)), x, x.new_zeros(()))


def place(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """The whole tensor with `rank`'s slice `x` in its places and zeros elsewhere."""
    _, dim, repeat, segments = spec
    shares, whole = _shares(segments, rank, tp), _whole(segments)
    want = [(-start, length) for (start, _), length in zip(shares, whole, strict=True)]
    return _window(x, dim, repeat, [n for _, n in shares], want)


def pad(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """`rank`'s slice `x`, every share padded with zeros to rank 0's: the same size on all ranks."""
    _, dim, repeat, segments = spec
    if _even(repeat, segments, tp):
        return _sized(x, dim, 1, [_even(repeat, segments, tp)])
    largest = [(0, n) for _, n in _shares(segments, 0, tp)]
    return _window(x, dim, repeat, [n for _, n in _shares(segments, rank, tp)], largest)


def trim(x: Tensor, spec: Spec, rank: int, tp: int) -> Tensor:
    """The inverse of `pad`."""
    _, dim, repeat, segments = spec
    if _even(repeat, segments, tp):
        return _sized(x, dim, 1, [_even(repeat, segments, tp)]).contiguous()
    mine = [(0, n) for _, n in _shares(segments, rank, tp)]
    return _window(x, dim, repeat, [n for _, n in _shares(segments, 0, tp)], mine).contiguous()


def deal(x: Tensor, spec: Spec, tp: int) -> Tensor:
    """The padded slices of all ranks of the whole `x`, stacked on a new first dimension of size `tp`."""
    _, dim, repeat, segments = spec
    if own := _even(repeat, segments, tp):
        return _sized(x, dim, 1, [tp * own]).unflatten(dim, (tp, own)).movedim(dim, 0).contiguous()
    shares = [n for _, n in _shares(segments, 0, tp)]
    x = _window(x, dim, repeat, _whole(segments), [(0, tp * n) for n in shares])
    x = x.unflatten(dim, (repeat, tp * sum(shares)))
    pieces = [p.unflatten(dim + 1, (tp, n)) for p, n in zip(_cut(x, dim + 1, shares, tp), shares, strict=True)]
    return _join(pieces, dim + 2).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def collect(stack: Tensor, spec: Spec, tp: int) -> Tensor:
    """The inverse of `deal`: the whole tensor from the stacked padded slices."""
    _, dim, repeat, segments = spec
    if own := _even(repeat, segments, tp):
        return _sized(stack, dim + 1, 1, [own]).movedim(0, dim).flatten(dim, dim + 1).contiguous()
    shares = [n for _, n in _shares(segments, 0, tp)]
    stack = stack.unflatten(dim + 1, (repeat, sum(shares))).movedim(0, dim + 1)
    x = _join([p.flatten(dim + 1, dim + 2) for p in _cut(stack, dim + 2, shares, 1)], dim + 1).flatten(dim, dim + 1)
    whole = [(0, n) for n in _whole(segments)]
    return _window(x, dim, repeat, [tp * n for n in shares], whole).contiguous()


def split(x: Tensor, spec: Spec, tp: int, seed: int = 0) -> list[Tensor]:
    """What each rank holds of the whole `x`.

    Args:
        x: the whole value.
        spec: its run-time layout. Partial summands (or candidates) are pseudo-random, so that an operator that is
            not linear shows.
        tp: number of ranks.
        seed: of the summands.

    Returns:
        One tensor per rank; the same `x` for I and R.
    """
    if spec[0] in "SG":
        return [(take if spec[0] == "S" else mask)(x, spec, rank, tp) for rank in range(tp)]
    if spec[0] != "P":
        return [x] * tp
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randint(1, 4, (tp - 1, *x.shape), generator=draw).to(x.device, x.dtype)
    if spec[1] == "max":
        return [x, *(x - n for n in noise)]
    return [x - noise.sum(0, dtype=x.dtype), *noise]


def recombine(xs: Sequence[Tensor], spec: Spec) -> Tensor:
    """The whole value from what each rank holds: slices put back, summands added, otherwise rank 0's (see `same`)."""
    if spec[0] == "G":
        return reduce(torch.add, [mask(x, spec, r, len(xs)) for r, x in enumerate(xs)])
    if spec[0] == "S":
        return collect(torch.stack([pad(x, spec, r, len(xs)) for r, x in enumerate(xs)]), spec, len(xs))
    if spec[0] == "P":
        return reduce(torch.add if spec[1] == "sum" else torch.maximum, xs)
    return xs[0]


def same(xs: Sequence[Tensor], tol: float = 0.0) -> bool:
    """Whether all ranks hold rank 0's value: to within `tol` times its largest finite magnitude; NaN equals NaN."""
    first = xs[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in xs):
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return all(torch.equal(x, first) for x in xs)
    finite = first[first.isfinite()].abs()
    atol = tol * float(finite.max()) if finite.numel() else 0.0
    return all(torch.allclose(x, first, 0.0, atol, equal_nan=True) for x in xs)


def _whole(segments: Sequence[tuple[int, int]]) -> list[int]:
    return [count * unit for count, unit in segments]


def _shares(segments: Sequence[tuple[int, int]], rank: int, tp: int) -> list[tuple[Any, Any]]:
    """(start, length) in elements of `rank`'s share of each segment: `layouts.chunk`, for symbolic counts too."""
    out = []
    for count, unit in segments:
        step = (count + tp - 1) // tp
        start = torch.sym_min(rank * step, count)
        out.append((start * unit, torch.sym_min(step, count - start) * unit))
    return out


def _even(repeat: int, segments: Sequence[tuple[int, int]], tp: int) -> int:
    """Elements of every rank's share where one run of one segment is dealt out evenly; 0 otherwise.

    All conversions of such a dimension are what they are in the general case, at a third of its cost.
    """
    count, unit = segments[0]
    if len(segments) > 1 or isinstance(repeat, torch.SymInt) or isinstance(count, torch.SymInt):
        return 0
    return 0 if repeat != 1 or count % tp else count // tp * unit


def _sized(x: Tensor, dim: int, repeat: int, have: Sequence[int]) -> Tensor:
    """`x`, whose dimension is so many runs of these lengths."""
    if x.shape[dim] != repeat * sum(have):
        raise PlanError(
            f"A conversion expects {repeat} x {list(have)} elements in dimension {dim} but got a tensor of shape "
            f"{tuple(x.shape)}. The plan was made for another shape, or a size in the graph was not made local."
        )
    return x


def _window(x: Tensor, dim: int, repeat: int, have: Sequence[int], want: Sequence[tuple[int, int]]) -> Tensor:
    """Of every segment (`have`: their lengths) the window (start, length); what lies outside the segment is zero."""
    x = _sized(x, dim, repeat, have)
    if all(start == 0 and length == n for (start, length), n in zip(want, have, strict=True)):
        return x
    axis = dim if repeat == 1 else dim + 1
    x = x if repeat == 1 else x.unflatten(dim, (repeat, sum(have)))
    pieces, at = [], 0
    for n, (start, length) in zip(have, want, strict=True):
        before: Any = torch.sym_max(-start, 0)
        first: Any = torch.sym_max(start, 0)
        inside: Any = torch.sym_min(start + length, n) - first
        zeros = (_zeros(x, axis, before), _zeros(x, axis, length - before - inside))
        pieces += [zeros[0], x.narrow(axis, at + first, inside), zeros[1]]
        at += n
    out = _join([p for p in pieces if p.shape[axis] != 0] or pieces[:1], axis)
    return out if repeat == 1 else out.flatten(dim, dim + 1)


def _zeros(x: Tensor, axis: int, length: int) -> Tensor:
    return x.new_zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _cut(x: Tensor, axis: int, shares: Sequence[int], times: int) -> list[Tensor]:
    """Consecutive pieces of `times * share` elements along `axis`."""
    return list(x.split([times * n for n in shares], axis)) if len(shares) != 1 else [x]


def _join(pieces: Sequence[Tensor], axis: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)
