"""Views and data movement: loops are regrouped, permuted, cut, joined or repeated; all are linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from autotp.ir.layouts import Size, divide, simplify
from autotp.ir.op import Carry, Factor, Op, Rule, Shape, aten

from .core import loops, product, rule, targets_of, with_factors, without
from .notation import einsum

if TYPE_CHECKING:
    from .local import ShardCall

THROUGH = (frozenset({0}),)
MERGED = -1  # no dimension, but several


def atoms(a: Shape, b: Shape) -> list[tuple[Size, int, int]]:
    """Find the loops that both shapes of one row-major array share, as (size, dimension of `a`, dimension of `b`).

    Args:
        a, b: shapes with equally many elements, the last dimension varying fastest.

    Returns: the loops, outermost first; `MERGED` in place of a dimension where several were merged to find one.
    """
    out: list[tuple[Size, int, int]] = []
    i = j = -1
    # Of several dimensions at hand, which one a loop is in cannot be said. Where sizes are expressions not all loops
    # may be found: those of [8, 1, 8] and [8 // s, s, 8] would seem to be one, of the first 8 and the last.
    many_a = many_b = False
    left: Size = 1
    right: Size = 1
    while True:
        # What is left of the dimension at hand is used up: go on to the next, past those of size 1, which hold no loop.
        while left == 1 and i + 1 < len(a):
            i, left, many_a = i + 1, a[i + 1], False
        while right == 1 and j + 1 < len(b):
            j, right, many_b = j + 1, b[j + 1], False
        if left == 1 or right == 1:
            return out
        # The smaller one is a loop of both where it divides the larger, of which a part is left: 12 and (3, 4) share 3,
        # then 4.
        inner, outer = divide(left, right), divide(right, left)
        of_a = MERGED if many_a else i
        of_b = MERGED if many_b else j
        if inner is not None:
            out.append((right, of_a, of_b))
            left, right = inner, 1
        elif outer is not None:
            out.append((left, of_a, of_b))
            left, right = 1, outer
        # No common loop here: merge until one appears. [3, 4, 5] and [4, 3, 5] share the 5 behind the 12 alone.
        elif i + 1 < len(a) and (j + 1 >= len(b) or _less(left, right)):
            i, left, many_a = i + 1, simplify(left * a[i + 1]), True
        elif j + 1 < len(b):
            j, right, many_b = j + 1, simplify(right * b[j + 1]), True
        else:
            return out


def _less(left: Size, right: Size) -> bool:
    return isinstance(left, int) and isinstance(right, int) and left < right


def _carries(sizes: list[Size], dims: list[int], shape: Shape) -> list[Carry | None]:
    """Place loops in their dimensions: the loops outside of one repeat it, those inside are its unit."""
    out: list[Carry | None] = []
    for k, (size, dim) in enumerate(zip(sizes, dims, strict=True)):
        repeat = product(n for n, d in zip(sizes[:k], dims[:k], strict=True) if d == dim)
        unit = product(n for n, d in zip(sizes[k + 1 :], dims[k + 1 :], strict=True) if d == dim)
        whole = dim != MERGED and simplify(repeat * size * unit) == shape[dim]
        out.append(Carry(dim, repeat, unit) if whole else None)
    return out


@rule(
    *targets_of(
        "view.default reshape _unsafe_view flatten unflatten ravel view_as reshape_as squeeze unsqueeze _reshape_copy "
        "view_copy.default atleast_1d.default atleast_2d.default atleast_3d.default"
    )
)
def reshape(op: Op) -> Rule:
    shared = atoms(op.ins[0], op.outs[0])
    sizes = [n for n, _, _ in shared]
    before = _carries(sizes, [i for _, i, _ in shared], op.ins[0])
    after = _carries(sizes, [j for _, _, j in shared], op.outs[0])
    others = [None] * (len(op.ins) - 1)
    carried = zip(sizes, before, after, strict=True)
    factors = [Factor(n, (x, *others), (y,)) for n, x, y in carried if x is not None and y is not None]
    return Rule(tuple(factors), THROUGH, localise=local_shape)


def local_shape(op: Op, local: ShardCall):
    """Make the same view of a shard, with local sizes. Always a reshape: what a conversion made may have other
    strides."""
    if not local.split:
        target, args, kwargs = local.unchanged(op)
        return aten.reshape.default if target is aten.view.default else target, args, kwargs
    return aten.reshape.default, (local.operands[0], local.out_shape(op)), {}


@rule(aten.expand.default, aten.expand_as, aten.broadcast_to)
def expand(op: Op) -> Rule:
    small, large = op.ins[0], op.outs[0]
    ins = without(range(-len(small), 0), {d for d in range(-len(small), 0) if small[d] != large[d]})
    others = [[None] * len(s) for s in op.ins[1:]]
    return loops(op, [ins, *others], [list(range(-len(large), 0))], linear=THROUGH, localise=_local_expand)


def _local_expand(op: Op, local: ShardCall):
    if not local.split:
        return local.unchanged(op)
    return aten.expand.default, (local.operands[0], local.out_shape(op)), {}


@rule(*targets_of("permute transpose.int t movedim moveaxis swapaxes numpy_T swapdims adjoint mT mH"))
def permute(op: Op) -> Rule:
    """Make the rule of permuted dimensions; the operator itself gives the order, on a tensor of distinct sizes."""
    n = len(op.ins[0])
    example = torch.empty(tuple(range(1, n + 1)), device="meta")
    result = op.target(*fx.map_arg(op.node.args, lambda _: example), **op.node.kwargs)
    return loops(op, [list(range(1, n + 1))], [list(result.shape)], linear=THROUGH)


@rule(aten.meshgrid)
def meshgrid(op: Op) -> Rule:
    """Make the rule: every operand is a dimension of every result; "xy" swaps the first two."""
    labels = list(range(len(op.ins)))
    order = [1, 0, *labels[2:]] if op.args.get("indexing") == "xy" and len(labels) > 1 else labels
    ins = [[i] * len(s) for i, s in enumerate(op.ins)]  # of a number the result has a dimension, but no loop
    result = without(order, {i for i, s in enumerate(op.ins) if not s})
    return loops(op, ins, [result] * len(op.outs))


@rule(aten.slice.Tensor, aten.narrow.default)
def slice_(op: Op) -> Rule:
    """Make the rule of a cut along one dimension, split only where the boundaries are between segments."""
    d, length = op.dim(), op.outs[0][op.dim()]
    n = op.ins[0][d]
    dims = "...[_]" if length != n else "..."
    base = einsum(op, f"{dims}->{dims}", linear="self", localise=_local_slice)
    start = op.args["start"] or 0
    if length == n or op.args.get("step", 1) != 1 or not all(isinstance(x, int) for x in (n, length, start)):
        return base
    start = max(start + n, 0) if start < 0 else min(start, n)
    factor = Factor(n, (Carry(d),), (Carry(d, piece=1),), pieces=(start, length, n - start - length))
    return with_factors(base, [factor])


def _local_slice(op: Op, local: ShardCall):
    pieces = local.pieces
    if pieces is None:
        whole = op.target is aten.narrow.default and local.in_partition(0, op.dim()) is not None
        return (aten.alias.default, (local.operands[0],), {}) if whole else local.unchanged(op)
    start, length = local.length(pieces[0]), local.length(pieces[1])
    return aten.narrow.default, (local.operands[0], op.dim(), start, length), {}


@rule(aten.split.Tensor, aten.split_with_sizes, aten.chunk, aten.tensor_split.sections, aten.split.sizes)
def split(op: Op) -> Rule:
    d = op.dim()
    base = einsum(op, "...[_]->...[_]", linear="self", localise=_local_split)
    pieces = tuple(s[d] for s in op.outs)
    if len(op.outs) > 64 or not all(isinstance(p, int) for p in pieces):
        return base
    cut = Factor(op.ins[0][d], (Carry(d),), tuple(Carry(d, piece=i) for i in range(len(pieces))), pieces)
    return with_factors(base, [cut])


def _local_split(op: Op, local: ShardCall):
    if local.pieces is None:
        return local.unchanged(op)
    return aten.split_with_sizes.default, (local.operands[0], [local.length(p) for p in local.pieces], op.dim()), {}


@rule(aten.cat, aten.concat, aten.concatenate, aten.hstack, aten.vstack)
def cat(op: Op) -> Rule:
    """Make the rule: the dimension of the concatenation is a loop cut into the operands' lengths, others are loops."""
    default = 1 if op.target is aten.hstack.default else 0
    d = op.args.get("dim", op.args.get("axis", default)) % len(op.outs[0])
    full = [len(s) == len(op.outs[0]) for s in op.ins]  # torch lets an empty vector stand among larger tensors
    # `vstack` of vectors and `hstack` of numbers make a dimension that no operand has.
    if any(s != (0,) and not f for s, f in zip(op.ins, full, strict=True)):
        return Rule()
    labels = without(range(len(op.outs[0])), {d})
    together = (frozenset(range(len(op.ins))),)
    of_operand = {True: labels, False: [None]}
    base = loops(op, [of_operand[f] for f in full], [labels], linear=together)
    pieces = tuple(s[d] for s, f in zip(op.ins, full, strict=True) if f)
    # A cache of a length that is a symbol beside one new token: nobody can say which rank the token falls to.
    if not all(isinstance(p, int) for p in pieces):
        return base
    ins: list[Carry | None] = []
    for i, f in enumerate(full):
        ins.append(Carry(d, piece=sum(full[:i])) if f else None)
    return with_factors(base, [Factor(op.outs[0][d], tuple(ins), (Carry(d),), pieces)])


@rule(aten.repeat.default, aten.tile.default)
def repeat(op: Op) -> Rule:
    """Make the rule: each dimension holds the operand's loop `repeats` times over."""
    new = len(op.outs[0]) - len(op.ins[0])
    factors = [
        Factor(n, (Carry(d),), (Carry(d + new, repeat=times),))
        for d, n in enumerate(op.ins[0])
        if (times := divide(op.outs[0][d + new], n)) is not None
    ]
    return Rule(tuple(factors), THROUGH)


def local_repeat(op: Op, local: ShardCall):
    args = local.arguments(op)
    return local.call(op, args if not local.split else {**args, "output_size": None})


@rule(aten.constant_pad_nd, aten.pad)
def pad(op: Op) -> Rule:
    """Make the rule: padded dimensions stay whole; zero padding is linear."""
    n, around = len(op.ins[0]), op.args["pad"]
    labels = without(range(n), {d for d in range(n) if any(around[2 * (n - 1 - d) :][:2])})
    zero = not op.args.get("value") and op.args.get("mode", "constant") == "constant"
    return loops(op, [labels], [labels], linear=THROUGH if zero else (), empty=zero)


def local_copy(op: Op, local: ShardCall):
    """Broadcast and cast the second operand like the first; torch's own operator has no derivative."""
    cast = local.emit(aten.to.dtype, (local.operands[1], op.node.meta["val"].dtype))
    return aten.expand_as.default, (cast, local.operands[0]), {}
