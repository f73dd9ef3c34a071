"""Products with the conversion before or after them as one function, so that communication runs beside arithmetic.

`grouped` is a conversion f or g and the products that read what it gives; `scattered` a product and the g* after it.
What each computes is what the calls it stands for compute; only when communication starts and ends differs:

| | communication | under which arithmetic |
| --- | --- | --- |
| f, backward | all-reduce of the input's gradient | gradients of the weights |
| g, forward | all-gather, in chunks | the products of the chunks before |
| g, backward | reduce-scatter of the input's gradient | gradients of the weights |
| g, backward, regathered | all-gather of the input again | the input's gradient |
| g*, forward | reduce-scatter, in chunks | the products of the chunks after |
| g*, backward | all-gather of the gradient, in chunks | the input's gradient of the chunks before |

A chunk holds a part of every rank's rows: evenly sharded rows stay on the ranks that had them. Where the rows of a call
do not divide into the chunks, they go in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from autotp.ir.specs import Spec

from . import collectives
from .conversions import function_for, kind_of

# A rank's `MeshPlace` as literals of a graph: rank, size of the axis, name of the group
PlaceLiterals = tuple[int, int, str]
LINEAR, MATMUL, ADDMM = "linear", "matmul", "addmm"
TURNED = {LINEAR: MATMUL, MATMUL: LINEAR, ADDMM: LINEAR}  # how a gradient is multiplied by the same weight


def grouped(
    x: Tensor, src: Spec, dst: Spec, kinds: Sequence[str], weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    chunks: int = 1, regather: bool = False, least: int = 1, *, rank: int, tp: int, group: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Convert a value (f or g) and multiply it by one or more weights.

    Args:
        x: what this rank holds under `src`, [..., k].
        src, dst: run-time layouts (`autotp.ir.specs`), of f (I -> R) or g (S -> R, not along k).
        kinds: for each product "linear" (weight [n, k]), "matmul" or "addmm" (weight [k, n]).
        weights, biases: for each product; a bias is [n], or None.
        chunks: number of chunks in which the rows are gathered.
        regather: keep `x` for the backward, and gather it again there.
        least: rows of `x` that a chunk must have, all dimensions but the last together; otherwise there is one chunk.
        rank, tp, group: this process on the axis, and the group's name.

    Returns:
        The products, [..., n] each.
    """
    chunks = chunks if chunks > 1 and _count(x) >= chunks * least else 1
    how = (src, dst, tuple(kinds), chunks, regather, (rank, tp, group))
    operands = [t for pair in zip(weights, biases, strict=True) for t in pair]
    # Not by `apply` where nothing is graded: Dynamo then binds a forward of any number of operands wrongly.
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *operands))):
        with torch.no_grad():
            return tuple(_gather(x, src, dst, kinds, weights, biases, chunks, (rank, tp, group), keep=False)[1])
    return _Grouped.apply(x, how, *operands)[1:]  # type: ignore[index]


def scattered(
    x: Tensor, src: Spec, dst: Spec, kind: str, weight: Tensor, bias: Tensor | None, view: Sequence[int] | None = None,
    chunks: int = 1, least: int = 1, *, rank: int, tp: int, group: str,
) -> Tensor:  # fmt: skip
    """Multiply, and reduce-scatter the partial products over the ranks (g*).

    Args:
        x: this rank's operand, [..., k].
        src, dst: P, and S along a dimension of the result other than its last.
        kind, weight, bias: of the product, as in `grouped`.
        view: sizes that the product's rows are viewed in before they are scattered; None: as they are.
        chunks: number of chunks in which the rows are scattered.
        least: rows that a rank must get in a chunk, as in `grouped`.
        rank, tp, group: this process on the axis, and the group's name.

    Returns:
        This rank's slice of the sum.
    """
    chunks = chunks if chunks > 1 and _count(x) >= chunks * least * tp else 1
    how = (src, dst, kind, None if view is None else tuple(view), chunks, (rank, tp, group))
    return _scatter(x, weight, bias, how) if not torch.is_grad_enabled() else _Scattered.apply(x, weight, bias, how)  # type: ignore[return-value]


def _count(x: Tensor) -> int:
    """Count the rows of a value, all dimensions but the last together."""
    return x.numel() // x.shape[-1]


class _Flight(NamedTuple):
    """A conversion under way; one without a `conversion` is complete."""

    value: Tensor
    dtype: torch.dtype
    conversion: tuple[Spec, Spec, PlaceLiterals] | None


def begin(x: Tensor, src: Spec, dst: Spec, place: PlaceLiterals) -> _Flight:
    """Start a conversion; where gradients of gradients are recorded it runs at once, differentiably."""
    rank, tp, group = place
    kind = kind_of(src, dst)
    if kind.primitive is None or kind.grouped or _twice():
        return _Flight(function_for(src, dst)(x, src, dst, rank=rank, tp=tp, group=group), x.dtype, None)
    wire = kind.pre(x, src, dst, rank, tp)
    started = collectives.start(kind.primitive, wire, src.reduction, tp=tp, group=group)
    return _Flight(started, x.dtype, (src, dst, place))


def _twice() -> bool:
    """Return whether gradients of gradients are recorded; never so where this is compiled."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def end(flight: _Flight) -> Tensor:
    """Wait for a conversion and return its result."""
    if flight.conversion is None:
        return flight.value
    src, dst, (rank, tp, group) = flight.conversion
    kind = kind_of(src, dst)
    assert kind.primitive is not None
    return kind.post(collectives.finish(kind.primitive, flight.value, flight.dtype, group), src, dst, rank, tp)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Any, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
        src, dst, kinds, chunks, regather, place = how
        weights: Any = operands[::2]
        weighed = any(ctx.needs_input_grad[2::2])
        keep = weighed and not regather and not src.whole
        whole, outs = _gather(x, src, dst, kinds, weights, operands[1::2], chunks, place, keep)
        ctx.how = how
        ctx.set_materialize_grads(False)
        operand = whole if keep else x
        ctx.save_for_backward(operand if weighed else None, *weights)
        # The gathered value is a result too: so its own gradient finds its way in gradients of gradients.
        return whole, *outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        src, dst, kinds, _, regather, place = ctx.how
        saved, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        converted = regather or src.whole and _twice()  # f does nothing but to the gradient
        again = begin(saved, src, dst, place) if converted and saved is not None else None
        rows: list[Tensor | None] = []
        for g in grads[1:]:
            rows.append(None if g is None else g.flatten(0, -2))
        # First the input's gradient, which others wait for: it is sent while those of the weights are computed.
        total = _input_gradient(kinds, weights, rows, grads[0], grads[1:]) if needs[0] else None
        whole = saved if again is None else end(again)
        flight = begin(total, dst.dual, src.dual, place) if total is not None else None
        gradients: list[Any] = []
        for i, (kind, g) in enumerate(zip(kinds, rows, strict=True)):
            gradients += _weight_gradients(kind, whole, g, needs[2 + 2 * i], needs[3 + 2 * i])
        return end(flight) if flight is not None else None, None, *gradients


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.how, ctx.shape = how, x.shape
        saved = x if needs[1] else None
        ctx.save_for_backward(saved, weight if needs[0] else None)
        return _scatter(x, weight, bias, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        src, dst, kind, _, chunks, place = ctx.how
        x, weight = ctx.saved_tensors
        turned, weights = ([TURNED[kind]], [weight]) if weight is not None else ([], [])
        sides = dst.dual, src.dual
        whole, inputs = _gather(grad, *sides, turned, weights, [None] * len(turned), chunks, place, keep=True)
        assert whole is not None
        rows = whole.flatten(0, -2)
        gradients = _weight_gradients(kind, x, rows, ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        return inputs[0].reshape(ctx.shape) if inputs else None, *gradients, None


def _gather(
    x: Tensor, src: Any, dst: Spec, kinds: Sequence[str], weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    chunks: int, place: PlaceLiterals, keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the converted value, where it is to be kept, and its products."""
    run = _run(src, place[1], chunks) if not src.whole and kinds else None
    if run is None or _twice():
        whole = x if src.whole else end(begin(x, src, dst, place))
        outs = [_product(*operands, whole) for operands in zip(kinds, weights, biases, strict=True)]
        return whole if keep else None, outs
    # While chunks to come are on their way, the products of the one that is there run.
    dim = src.dim
    parts = x.unflatten(dim, run).unbind(dim + 1)
    pieces: list[list[Tensor]] = []
    for rows in _along("all_gather", parts, x.dtype, place):  # [tp, ..., repeat, length, ..., k]
        pieces.append([_product(*operands, rows) for operands in zip(kinds, weights, biases, strict=True)])
        pieces[-1] += [rows] if keep else []
    wholes = []
    for same in zip(*pieces, strict=True):
        chunked = torch.stack([p.movedim(0, dim + 1) for p in same], dim + 2)  # [..., repeat, tp, chunks, length, ...]
        wholes.append(chunked.flatten(dim, dim + 3))
    return wholes.pop() if keep else None, wholes


def _scatter(x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
    """Return this rank's slice of the summed product."""
    src, dst, kind, view, chunks, place = how
    rows = x if view is None else x.reshape(*view, x.shape[-1])
    run = _run(dst, place[1], chunks)
    if run is None:
        return end(begin(_product(kind, weight, bias, rows), src, dst, place))
    dim, (repeat, chunks, length) = dst.dim, run
    parts = rows.unflatten(dim, (repeat, place[1], chunks, length)).movedim(dim + 1, 0).unbind(dim + 2)
    products = (_product(kind, weight, bias, part) for part in parts)
    return torch.stack(list(_along("reduce_scatter", products, x.dtype, place)), dim + 1).flatten(dim, dim + 2)


def _along(
    primitive: collectives.Primitive, values: Iterable[Tensor], dtype: torch.dtype, place: PlaceLiterals
) -> Iterator[Tensor]:
    """Yield the collectives' results, with later ones already under way. On a CPU one is under way at a time: with
    several gathers gloo (torch 2.13) corrupts memory and ends the process."""
    flights: list[Tensor] = []
    _, tp, group = place
    for value in values:
        full = flights and value.device.type == "cpu"
        rows = [collectives.finish(primitive, flights.pop(), dtype, group)] if full else []
        flights.append(collectives.start(primitive, value, "sum", tp=tp, group=group))
        yield from rows
    for flight in flights:
        yield collectives.finish(primitive, flight, dtype, group)


def _run(spec: Any, tp: int, chunks: int) -> tuple[int, int, int] | None:
    """Return (repeat, chunks, length) of a rank's rows where they are sharded evenly and divide into the chunks."""
    repeat, segments = spec.repeat, spec.segments
    if chunks == 1 or len(segments) != 1 or len(segments[0]) > 2 or segments[0][0] % tp != 0:
        return None
    rows = segments[0][0] // tp * segments[0][1]
    return (repeat, chunks, rows // chunks) if rows % chunks == 0 and rows > 0 else None


def _product(kind: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if kind == LINEAR:
        return functional.linear(x, weight, bias)
    if kind == MATMUL:
        return torch.matmul(x, weight)
    assert bias is not None
    return torch.addmm(bias, x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def _input_gradient(
    kinds: Sequence[str], weights: Sequence[Tensor], rows: Sequence[Tensor | None], first: Tensor | None,
    grads: Sequence[Tensor | None],
) -> Tensor | None:  # fmt: skip
    """Sum over the products in the order in which autograd adds: the last call's gradient first."""
    shape = next((g.shape[:-1] for g in grads if g is not None), ())
    total: Tensor | None = None
    for kind, weight, g in reversed(list(zip(kinds, weights, rows, strict=True))):
        if g is not None:
            part = _product(TURNED[kind], weight, None, g)
            if total is not None:  # in place, but where a gradient of gradients reads the sum before
                part = total + part if _twice() else total.add_(part)
            total = part
    total = total.unflatten(0, shape) if total is not None else None
    if total is None or first is None:
        return first if total is None else total
    return total + first


def _weight_gradients(
    kind: str, x: Tensor | None, g: Tensor | None, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias that are wanted."""
    if g is None:
        return None, None
    gradient = None
    if weight:
        assert x is not None
        rows = x.flatten(0, -2)
        gradient = g.t() @ rows if kind == LINEAR else rows.t() @ g
    return gradient, g.sum(0) if bias else None
