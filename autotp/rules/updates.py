"""Writing into a part of a value: the dual of looking up. Dimensions that are written along stay whole."""

from __future__ import annotations

from autotp.ir.op import Op, Rule, aten

from .core import einsum, loops, rule
from .lookup import advanced


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(op: Op) -> Rule:
    """The other dimensions split where all have the same length; what is added may be added in parts."""
    d, n, adds = op.dim(), len(op.ins[0]), op.target is aten.scatter_add.default
    free = [i if i != d and len({s[i] for s in op.ins}) == 1 else None for i in range(n)]
    adds = adds and op.ins[1][d] == op.ins[2][d]
    parts = [*free[:d], "k" if adds else None, *free[d + 1 :]]
    linear = (frozenset({0, 2}),) if len(op.ins) == 3 else ()
    addends = frozenset({0} if adds else ())
    return loops(op, [free, *[parts] * (len(op.ins) - 1)], [free], linear=linear, addends=addends)


@rule(aten.scatter_reduce.two)
def scatter_reduce(op: Op) -> Rule:
    """As `scatter`, but that no reduction, of sums or of others, is done in parts."""
    free = [i if i != op.dim() and len({s[i] for s in op.ins}) == 1 else None for i in range(len(op.ins[0]))]
    return loops(op, [free] * 3, [free])


@rule(aten.index_add.default, aten.index_copy.default)
def index_add(op: Op) -> Rule:
    d, adds = op.dim(), op.target is aten.index_add.default
    free = [i if i != d else None for i in range(len(op.ins[0]))]
    parts = [*free[:d], "k" if adds else None, *free[d + 1 :]]
    ins = [free, [parts[d]], parts]
    return loops(op, ins, [free], linear=(frozenset({0, 2}),), addends=frozenset({0} if adds else ()))


@rule(aten.index_reduce.default)
def index_reduce(op: Op) -> Rule:
    """As `index_add`, but that no reduction is done in parts."""
    free = [i if i != op.dim() else None for i in range(len(op.ins[0]))]
    return loops(op, [free, [None], free], [free])


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(op: Op) -> Rule:
    free = [i if i != op.dim() else None for i in range(len(op.ins[0]))]
    return loops(op, [free, [None], *[[] for _ in op.ins[2:]]], [free])


@rule(aten.index_put.default)
def index_put(op: Op) -> Rule:
    """Indexed dimensions stay whole; values that are added may be added in parts. A mask is pointwise."""
    found = advanced(op, op.ins[1:-1])
    if found is None:
        return _masked_put(op)
    table, indices, result = found
    sizes = {x: s for t, shape in zip([table, *indices], op.ins, strict=False) for x, s in zip(t, shape, strict=True)}
    given = zip(result[len(result) - len(op.ins[-1]) :], op.ins[-1], strict=True)
    values = [x if n == sizes.get(x) else None for x, n in given]
    along = frozenset(x for x in result if isinstance(x, str))
    parts = op.args["accumulate"] and along <= set(values)
    fields = {"addends": frozenset({0})} if parts else {"whole": along}
    return loops(op, [table, *indices, values], [table], linear=(frozenset({0, len(op.ins) - 1}),), **fields)


def _masked_put(op: Op) -> Rule:
    """A single mask over the leading dimensions chooses where one value goes."""
    if len(op.ins) != 3 or op.args["indices"][0] is None or any(n != 1 for n in op.ins[2]):
        return Rule()
    dims = list(range(len(op.ins[0])))
    return loops(op, [dims, dims[: len(op.ins[1])], [None] * len(op.ins[2])], [dims])


@rule(aten.masked_scatter.default)
def masked_scatter(op: Op) -> Rule:
    """Which element goes where is data; a last dimension that the mask does not tell apart moves in whole rows."""
    value, mask, source = op.ins
    rows = mask[-1:] == (1,) and value[-1:] == source[-1:]
    terms = ["_" * (len(s) - 1) + "h" if rows else "_" * len(s) for s in (value, source)]
    return einsum(op, f"{terms[0]},{'_' * len(mask)},{terms[1]}->{terms[0]}", linear=(frozenset({0, 2}),))


@rule(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter)
def part_scatter(op: Op) -> Rule:
    n = len(op.ins[0])
    dims = [op.dim()] if "dim" in op.args else [op.dim("dim1"), op.dim("dim2")]
    free = [i if i not in dims else None for i in range(n)]
    rest = [i for i in range(n) if i not in dims]
    part = free if len(op.ins[1]) == n else rest if len(dims) == 1 else [*rest, None]
    return loops(op, [free, part], [free], linear=(frozenset({0, 1}),))
