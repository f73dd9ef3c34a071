"""Looking up along a dimension, and bags of rows; along a split one: the local index, a mask, and a partial result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.op import Op, Rule, Shape, aten
from autotp.ir.specs import Runs

from .core import loops, rule, without

if TYPE_CHECKING:
    from .local import ShardCall


def local_embedding(op: Op, local: ShardCall):
    vocabulary = local.in_partition(0, 0)
    if vocabulary is None:
        return local.unchanged(op)
    weight, ids = local.operands
    return local.ranked(vocabulary_embedding, weight, ids, local.runs(vocabulary), op.args["padding_idx"])


def local_index(ids: Tensor, runs: Runs, rank: int, tp: int) -> tuple[Tensor, Tensor]:
    """Convert global indices of a sharded dimension to indices into this rank's shard, and say which of them it has."""
    index, mine, offset = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool), 0
    for start, length in runs.spans(rank, tp):
        here = (ids >= start) & (ids < start + length)
        index, mine, offset = torch.where(here, ids - start + offset, index), mine | here, offset + length
    return index, mine


def vocabulary_embedding(weight: Tensor, ids: Tensor, runs: Runs, padding: int, *, rank: int, tp: int) -> Tensor:
    """Look up this rank's summand of `embedding(whole weight, ids)`: the rows it has, zeros for the others.

    An id that is no row of the whole is on no rank: all of them fail as the original does.

    Args:
        weight: this rank's rows, [rows here, n]. ids: of the whole, of any shape.
        runs: distribution of the rows. padding: the id whose row has no gradient; below zero for none.
        rank, tp: this rank, of how many.

    Returns: [*ids, n].
    """
    index, mine = local_index(ids, runs, rank, tp)
    in_range = (ids >= 0) & (ids < runs.length)
    keep = mine & (ids != padding) if padding >= 0 else mine
    table = weight if weight.shape[0] else weight.sum(0, keepdim=True)  # no rows here: zeros that reach the weight
    rows = aten.embedding.default(table, torch.where(in_range, index, table.shape[0]))
    masked = torch.where(keep.unsqueeze(-1), rows, 0)
    return masked if padding < 0 else masked + torch.where((mine & ~keep).unsqueeze(-1), rows.detach(), 0)


@rule(aten.index.Tensor)
def index(op: Op) -> Rule:
    """Make the rule of advanced indexing: indexed dimensions stay whole; the others and the index's own split."""
    labels = advanced(op, op.ins[1:])
    if labels is None:
        return Rule()
    table, indices, result = labels
    return loops(op, [table, *indices], [result], linear=(frozenset({0}),))


def advanced(op: Op, shapes: list[Shape]) -> tuple[list, list[list], list] | None:
    """Label the dimensions of a lookup by several indices, `table[:, i, j]`.

    Args:
        op: its first operand is the table, of any shape; `indices` has None for each dimension that is taken whole.
        shapes: of the indices, which are broadcast together.

    Returns:
        Labels of the table's dimensions, of each index's, and of the result's; None for masks, whose result is as long
        as the data says.
    """
    if any(s.meta["val"].dtype in (torch.bool, torch.uint8) for s in op.slots[1 : 1 + len(shapes)]):
        return None
    at = [d for d, i in enumerate(op.args["indices"]) if i is not None]
    free = [d for d in range(len(op.ins[0])) if d not in at]
    # The indices' dimensions replace the indexed ones where these are adjacent, or else come first: x[:, i, j] has them
    # second, x[i, :, j] first.
    together = at == list(range(at[0], at[-1] + 1))
    before = [d for d in free if together and d < at[0]]
    # Labels of the indices' common shape; a shorter index has the last of them, as broadcasting aligns it.
    wide = [f"i{k}" for k in range(max(map(len, shapes)))]
    ends = [wide[len(wide) - len(s) :] for s in shapes]
    # A dimension of size 1 is broadcast, and no loop; but where it has size 1 in every index, it is the loop.
    long: set[str] = set()
    for end, shape in zip(ends, shapes, strict=True):
        long |= {x for x, n in zip(end, shape, strict=True) if n != 1}
    indices = []
    for end, shape in zip(ends, shapes, strict=True):
        present = {x for x, n in zip(end, shape, strict=True) if n != 1}
        indices.append(without(end, long - present))
    table = without(range(len(op.ins[0])), at)
    after = [d for d in free if d not in before]
    return table, indices, [*before, *wide, *after]


@rule(aten.index_put.default)
def index_put(op: Op) -> Rule:
    """Make the rule of a write: indexed dimensions stay whole; sums may be added in parts. A mask is pointwise."""
    labels = advanced(op, op.ins[1:-1])
    if labels is None:
        return _masked_put(op)
    table, indices, result = labels
    sizes = {x: s for t, shape in zip([table, *indices], op.ins, strict=False) for x, s in zip(t, shape, strict=True)}
    ends = result[len(result) - len(op.ins[-1]) :]
    values = without(ends, {x for x, n in zip(ends, op.ins[-1], strict=True) if n != sizes.get(x)})
    along = frozenset(x for x in result if isinstance(x, str))
    parts = op.args["accumulate"] and along <= set(values)
    fields: dict[str, Any] = {"addends": frozenset({0})} if parts else {"whole": along}
    return loops(op, [table, *indices, values], [table], linear=(frozenset({0, len(op.ins) - 1}),), **fields)


def _masked_put(op: Op) -> Rule:
    """Make the rule of one value written by a single mask over the leading dimensions."""
    if len(op.ins) != 3 or op.args["indices"][0] is None or any(n != 1 for n in op.ins[2]):
        return Rule()
    dims = list(range(len(op.ins[0])))
    return loops(op, [dims, dims[: len(op.ins[1])], [None] * len(op.ins[2])], [dims])


SUM, MEAN, MAX = range(3)  # modes of embedding_bag, as in ATen
ARGUMENTS = ("scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")


def local_bags(op: Op, local: ShardCall):
    args = local.arguments(op)
    rest = [args.get(name) for name in ARGUMENTS]
    rows = local.in_partition(0, 0)
    if rows is not None:
        return local.ranked(bags_of_rows, *local.operands[:3], local.runs(rows), *rest)
    return local.ranked(bags_of_columns, *local.operands[:3], *rest) if local.split else local.unchanged(op)


def bags_of_columns(weight: Tensor, ids: Tensor, offsets: Tensor, *rest: Any, rank: int, tp: int) -> tuple[Tensor, ...]:
    """Compute the bags of this rank's columns, and on rank 0 the results that are the same on all.

    Args:
        weight: this rank's columns, [rows, columns here]. ids: of rows, [n]. offsets: where each bag begins.
        rest: the operator's further arguments, by `ARGUMENTS`. rank, tp: this rank, of how many.

    Returns: the operator's results.
    """
    values, *numbers = aten.embedding_bag.padding_idx(weight, ids, offsets, *rest)
    shared = numbers[:2] if rest[1] == MAX else numbers
    return (values, *_once(shared, rank), *numbers[len(shared) :])


def bags_of_rows(
    weight: Tensor, ids: Tensor, offsets: Tensor, runs: Runs, *rest: Any, rank: int, tp: int
) -> tuple[Tensor, ...]:
    """Compute this rank's summand of the bags, from the rows that it has.

    An id that is no row of the whole is on no rank: all of them fail as the original does.

    Args:
        weight: this rank's rows, [rows here, columns]. ids: of the whole, [n]. offsets: where each bag begins.
        runs: distribution of the rows. rest: as of `bags_of_columns`. rank, tp: this rank, of how many.

    Returns: the operator's results.
    """
    _, mode, _, scale, last, padding = rest
    index, mine = local_index(ids, runs, rank, tp)
    index = torch.where((ids >= 0) & (ids < runs.length), index, weight.shape[0])
    live = torch.ones_like(mine) if padding is None else ids != padding
    scales = (mine & live).to(weight.dtype)
    scales = scales if scale is None else scales * scale
    values, *numbers = aten.embedding_bag.padding_idx(weight, index, offsets, False, SUM, False, scales, last, None)
    if mode == MEAN:
        ones, weights = weight.new_ones(1, 1), live.to(weight.dtype)
        few = aten.embedding_bag.padding_idx(
            ones, torch.zeros_like(ids), offsets, False, SUM, False, weights, last, None
        )
        values = values / few[0].clamp(min=1)
        numbers[1:] = [few[0][:, 0].to(ids.dtype)] * 2
    return (values, *_once(numbers, rank))


def _once(numbers: list[Tensor], rank: int) -> list[Tensor]:
    """Convert numbers that are the same on all ranks to summands: zeros on all but rank 0."""
    if rank == 0:
        return numbers
    return [torch.zeros_like(x) for x in numbers]
