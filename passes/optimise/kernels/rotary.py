"""Where rotary embeddings are in a graph.

As `x * cos + turned(x) * sin`, every pair (a, b) turned to (-b, a); or as `a * cos - b * sin` and `b * cos + a * sin`.
"""

from __future__ import annotations

import operator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx

from autotp.ir.op import aten, sizes
from autotp.kernels.common import DTYPES, WIDE
from autotp.kernels.rotary import MOST_DIMS
from autotp.passes.optimise.matching import CASTS, calls, closed, put, value_of, whole_along

OPS: Any = torch.ops.autotp


class _Turned(NamedTuple):
    """A value with its pairs turned, and the nodes that do it."""

    x: fx.Node
    interleaved: bool
    nodes: tuple[fx.Node, ...]


class _Part(NamedTuple):
    """Of every pair of a value one element: the first of them, or the second."""

    x: fx.Node
    second: bool


def rotate(node: fx.Node) -> fx.Node | None:
    """A sum of two products, of a value and of the same value turned; in float32 perhaps, as the kernel computes it."""
    total, casts = _before(node, narrowing=True)
    if not calls(total, aten.add) or len(total.args) != 2 or total.kwargs:
        return None
    for plain, turning in (total.args, total.args[::-1]):
        for factor, sin in _factors(turning):
            wide, between = _before(factor)
            turned = _turned(wide)
            if turned is None:
                continue
            x = _before(turned.x)[0]
            cos = next((c for one, c in _factors(plain) if _before(one)[0] is x), None)
            nodes = (*casts, total, plain, turning, *between, *turned.nodes)
            if cos is not None and _fits(x, cos, sin, node) and closed(nodes, (node,)):
                args = x, cos, sin, turned.interleaved, value_of(node).dtype
                return put(OPS.rotary.default, args, nodes, node)
    return None


def rotate_pairs(node: fx.Node) -> fx.Node | None:
    """The first and the second elements of all pairs, rotated apart and put together."""
    joined, casts = _before(node, narrowing=True)
    pair = _joined(joined)
    if pair is None or not calls(pair[0][0], aten.sub) or not calls(pair[0][1], aten.add):
        return None
    (first, second), interleaved, nodes = pair
    if any(len(total.args) != 2 or total.kwargs for total in (first, second)):
        return None
    part = _neighbour if interleaved else _half
    for (one, cos), (other, sin) in product(*map(_factors, first.args)):
        parts = part(one), part(other)
        for total in (second.args, second.args[::-1]):
            same = (other, cos) in _factors(total[0]) and (one, sin) in _factors(total[1])
            if not same or parts[0] is None or not _pair(*parts):
                continue
            x = _before(parts[0].x)[0]
            every = (*casts, *nodes, first, second, *first.args, *second.args, one, other)
            if _fits(x, cos, sin, node, 2) and closed(every, (node,)):
                return put(OPS.rotary.default, (x, cos, sin, interleaved, value_of(node).dtype), every, node)
    return None


def _before(node: Any, narrowing: bool = False) -> tuple[Any, tuple[fx.Node, ...]]:
    """What a cast to float32 is of (or one from float32, where it is narrowing), and the cast; else the node itself."""
    if isinstance(node, fx.Node) and node.target in CASTS:
        before: Any = node.args[0]
        dtypes = [value_of(n).dtype for n in (before, node)]
        if dtypes[0 if narrowing else 1] == WIDE and set(dtypes) <= set(DTYPES):
            return before, (node,)
    return node, ()


def _factors(node: Any) -> list[tuple[Any, Any]]:
    """The factors of a product in either order; none where it is none."""
    if not calls(node, aten.mul) or not all(isinstance(x, fx.Node) for x in node.args):
        return []
    a, b = node.args
    return [(a, b), (b, a)]


def _fits(x: fx.Node, cos: fx.Node, sin: fx.Node, out: fx.Node, each: int = 1) -> bool:
    """Whether the kernel takes them: tables with a number for so many elements, and no last dimension dealt out."""
    shape = sizes(value_of(x))
    values = [value_of(n) for n in (x, cos, sin)]
    return (
        all(v.dtype in DTYPES and v.ndim for v in values)
        and all(each * sizes(v)[-1] == shape[-1] for v in values[1:])
        and sizes(value_of(out)) == shape
        and len(shape) <= MOST_DIMS
        and all(whole_along(n, -1) for n in (cos, sin, out))
    )


def _turned(node: Any) -> _Turned | None:
    """A value that is another one turned: by its halves, or by neighbours."""
    pair = _joined(node)
    if pair is None or not calls(pair[0][0], aten.neg):
        return None
    (minus, same), interleaved, nodes = pair
    part = _neighbour if interleaved else _half
    other, one = part(minus.args[0]), part(same)
    if one is None or not _pair(one, other) or sizes(value_of(node)) != sizes(value_of(one.x)):
        return None
    return _Turned(one.x, interleaved, (*nodes, minus, same, minus.args[0]))


def _joined(node: Any) -> tuple[list[Any], bool, tuple[fx.Node, ...]] | None:
    """Two values put together in the last dimension, one after the other or interleaved; and the nodes that do it."""
    interleaved = calls(node, aten.reshape, aten.view, aten.flatten) and calls(node.args[0], aten.stack)
    if not interleaved and not calls(node, aten.cat):
        return None
    join: Any = node.args[0] if interleaved else node
    pair, dim = join.args[0], join.args[1] if len(join.args) > 1 else 0
    if len(pair) != 2 or dim not in (-1, value_of(join).ndim - 1):
        return None
    return pair, interleaved, (node, join) if interleaved else (node,)


def _pair(one: Any, other: Any) -> bool:
    """Whether these are the first and the second elements of the pairs of one value."""
    return one is not None and other is not None and one.x is other.x and not one.second and other.second


def _half(node: Any) -> _Part | None:
    """One half of the last dimension."""
    piece = _piece(node)
    if piece is None or piece[3] != 1:
        return None
    x, start, end, _ = piece
    width = sizes(value_of(x))[-1]
    if (2 * start, 2 * end) not in ((0, width), (width, 2 * width)):
        return None
    return _Part(x, start > 0)


def _neighbour(node: Any) -> _Part | None:
    """Every other element of the last dimension, from the first or the second on."""
    piece = _piece(node)
    if piece is None or piece[1] not in (0, 1) or piece[3] != 2:
        return None
    x, start, end, _ = piece
    width = sizes(value_of(x))[-1]
    return _Part(x, start == 1) if width % 2 == 0 and end == width else None


def _piece(node: Any) -> tuple[Any, int, int, int] | None:
    """What is cut from the last dimension of which value, which is whole there: start, end and step."""
    cut, place = node.args if _is_item(node) else (node, 0)
    if not calls(cut, aten.slice, aten.split_with_sizes, aten.split, aten.chunk) or cut.kwargs:
        return None
    x, *options = cut.args
    width = sizes(value_of(x))[-1]
    if calls(cut, aten.slice):
        dim, start, end, step = (*options, *(0, None, None, 1)[len(options) :])
        start, end = start or 0, width if end is None else end
    else:
        into, dim, step = (*options, 0)[0], (*options, 0)[1], 1
        start, end = _between(into, place, width, calls(cut, aten.chunk))
    if dim not in (-1, value_of(x).ndim - 1) or not whole_along(x, -1):
        return None
    numbers = [n for n in (width, start, end, step) if isinstance(n, int) and n >= 0]
    if len(numbers) < 4:
        return None
    width, start, end, step = numbers
    return x, start, min(end, width), step


def _is_item(node: Any) -> bool:
    """Whether this is one of several results."""
    return isinstance(node, fx.Node) and node.target is operator.getitem


def _between(into: Any, place: int, width: Any, chunks: bool) -> tuple[Any, Any]:
    """Where a piece of a dimension starts and ends, cut into pieces of these sizes, of this size, or into so many."""
    if isinstance(into, list | tuple):
        constant = all(isinstance(n, int) for n in into)
        return (sum(into[:place]), sum(into[: place + 1])) if constant else (-1, -1)
    if not isinstance(width, int):
        return -1, -1
    length = -(-width // into) if chunks else into
    return place * length, (place + 1) * length
