"""Writing into a part of a value: the dual of looking up. Dimensions that are written along stay whole."""

from __future__ import annotations

from .core import Op, Rule, aten, loops, rule
from .lookup import advanced


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(op: Op) -> Rule:
    """The other dimensions split where all have the same length; what is added may be added in parts."""
    d, n, adds = op.dim(), len(op.ins[0]), op.target is aten.scatter_add.default
    free = [i if i != d and len({s[i] for s in op.ins}) == 1 else None for i in range(n)]
    parts: list = [*free]
    parts[d] = "k" if adds and op.ins[1][d] == op.ins[2][d] else None
    linear = (frozenset({0, 2}),) if len(op.ins) == 3 else ()
    return loops(
        op, [free, *[parts] * (len(op.ins) - 1)], [free], linear=linear, addends=frozenset({0} if adds else ())
    )


@rule(aten.index_add.default, aten.index_copy.default)
def index_add(op: Op) -> Rule:
    d, adds = op.dim(), op.target is aten.index_add.default
    free = [i if i != d else None for i in range(len(op.ins[0]))]
    parts = [*free[:d], "k" if adds else None, *free[d + 1 :]]
    ins = [free, [parts[d]], parts]
    return loops(op, ins, [free], linear=(frozenset({0, 2}),), addends=frozenset({0} if adds else ()))


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(op: Op) -> Rule:
    free = [i if i != op.dim() else None for i in range(len(op.ins[0]))]
    return loops(op, [free, [None], *[[] for _ in op.ins[2:]]], [free])


@rule(aten.index_put.default)
def index_put(op: Op) -> Rule:
    """Indexed dimensions stay whole; values that are added may be added in parts. A mask is pointwise."""
    adds, n = op.args["accumulate"], len(op.ins[0])
    found = advanced(op, op.ins[1:-1])
    if found is None:
        mask, value = op.ins[1], op.ins[-1]
        whole = list(range(n))
        return loops(op, [whole, whole[: len(mask)], [None] * len(value)], [whole]) if _one_mask(op) else Rule()
    table, indices, result = found
    values = result[len(result) - len(op.ins[-1]) :]
    sizes = {x: s for t, shape in zip([table, *indices], op.ins, strict=False) for x, s in zip(t, shape, strict=True)}
    values = [x if op.ins[-1][i] == sizes.get(x) else None for i, x in enumerate(values)]
    along = {x for x in result if isinstance(x, str)}
    parts = along <= set(values) and adds
    addends = frozenset({0} if parts else ())
    whole_dims = frozenset() if parts else frozenset(along)
    return loops(
        op, [table, *indices, values], [table], whole=whole_dims, linear=(frozenset({0, len(op.ins) - 1}),), addends=addends
    )  # fmt: skip


def _one_mask(op: Op) -> bool:
    """Whether a single mask over the leading dimensions chooses where one value goes."""
    return len(op.ins) == 3 and op.args["indices"][0] is not None and all(s == 1 for s in op.ins[2])


@rule(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter)
def part_scatter(op: Op) -> Rule:
    n = len(op.ins[0])
    dims = [op.dim()] if "dim" in op.args else [op.dim("dim1"), op.dim("dim2")]
    free = [i if i not in dims else None for i in range(n)]
    rest = [i for i in range(n) if i not in dims]
    part = free if len(op.ins[1]) == n else rest if len(dims) == 1 else [*rest, None]
    return loops(op, [free, part], [free], linear=(frozenset({0, 1}),))
