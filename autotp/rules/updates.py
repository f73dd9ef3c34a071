"""Writing into a part of a value: the dual of looking up. Dimensions that are written along stay whole."""

from __future__ import annotations

from autotp.ir.op import Op, Rule, aten

from .core import Label, dim_labels, einsum, loops, masked, rule
from .lookup import advanced


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(op: Op) -> Rule:
    """The other dimensions split where all have the same length; what is added may be added in parts."""
    d, adds = op.dim(), op.target is aten.scatter_add.default
    labels = _alike(op)
    adds = adds and op.ins[1][d] == op.ins[2][d]
    parts = [*labels[:d], "k" if adds else None, *labels[d + 1 :]]
    linear = (frozenset({0, 2}),) if len(op.ins) == 3 else ()
    addends = frozenset({0} if adds else ())
    return loops(op, [labels, *[parts] * (len(op.ins) - 1)], [labels], linear=linear, addends=addends)


def _alike(op: Op) -> list[Label]:
    """Labels of the dimensions that are not written along and have the same length in all operands."""
    labels = dim_labels(len(op.ins[0]), {op.dim()})
    for i in [x for x in labels if x is not None]:
        if len({shape[i] for shape in op.ins}) > 1:
            labels[i] = None
    return labels


@rule(aten.scatter_reduce.two)
def scatter_reduce(op: Op) -> Rule:
    """Rule of `scatter`, but that no reduction, of sums or of others, is done in parts."""
    labels = _alike(op)
    return loops(op, [labels] * 3, [labels])


@rule(aten.index_add.default, aten.index_copy.default)
def index_add(op: Op) -> Rule:
    d, adds = op.dim(), op.target is aten.index_add.default
    labels = dim_labels(len(op.ins[0]), {d})
    parts = [*labels[:d], "k" if adds else None, *labels[d + 1 :]]
    ins = [labels, [parts[d]], parts]
    return loops(op, ins, [labels], linear=(frozenset({0, 2}),), addends=frozenset({0} if adds else ()))


@rule(aten.index_reduce.default)
def index_reduce(op: Op) -> Rule:
    """Rule of `index_add`, but that no reduction is done in parts."""
    labels = dim_labels(len(op.ins[0]), {op.dim()})
    return loops(op, [labels, [None], labels], [labels])


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(op: Op) -> Rule:
    labels = dim_labels(len(op.ins[0]), {op.dim()})
    return loops(op, [labels, [None], *[[] for _ in op.ins[2:]]], [labels])


@rule(aten.index_put.default)
def index_put(op: Op) -> Rule:
    """Indexed dimensions stay whole; values that are added may be added in parts. A mask is pointwise."""
    labels = advanced(op, op.ins[1:-1])
    if labels is None:
        return _masked_put(op)
    table, indices, result = labels
    sizes = {x: s for t, shape in zip([table, *indices], op.ins, strict=False) for x, s in zip(t, shape, strict=True)}
    ends = result[len(result) - len(op.ins[-1]) :]
    values = masked(ends, {x for x, n in zip(ends, op.ins[-1], strict=True) if n == sizes.get(x)})
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
    """Rule of masks: which element goes where is data; a last dimension that the mask does not tell apart moves in
    whole rows."""
    value, mask, source = op.ins
    rows = mask[-1:] == (1,) and value[-1:] == source[-1:]
    terms = ["_" * len(s) for s in (value, source)]
    if rows:
        terms = [term[:-1] + "h" for term in terms]
    return einsum(op, f"{terms[0]},{'_' * len(mask)},{terms[1]}->{terms[0]}", linear=(frozenset({0, 2}),))


@rule(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter)
def part_scatter(op: Op) -> Rule:
    n = len(op.ins[0])
    dims = [op.dim()] if "dim" in op.args else [op.dim("dim1"), op.dim("dim2")]
    labels = dim_labels(n, dims)
    part = labels
    if len(op.ins[1]) != n:
        rest = [x for x in labels if x is not None]
        part = rest if len(dims) == 1 else [*rest, None]
    return loops(op, [labels, part], [labels], linear=(frozenset({0, 1}),))
