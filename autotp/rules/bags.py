"""Sums, means and maxima of bags of table rows: columns split, and rows, of which every rank sums its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.op import Carry, Factor, Op, Rule, aten
from autotp.ir.specs import Runs

from .core import rule
from .lookup import local_index

if TYPE_CHECKING:
    from .local import ShardCall

SUM, MEAN, MAX = range(3)
ARGUMENTS = ("scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")


@rule(aten.embedding_bag)
def embedding_bag(op: Op) -> Rule:
    """Bags of ids stay whole; the numbers beside the values, of bags and of ids, are counted once."""
    rows, columns = op.ins[0]
    rest = [None] * (len(op.ins) - 1)
    indices = Carry(1) if op.args["mode"] == MAX else None
    factors = [Factor(columns, (Carry(1), *rest), (Carry(1), None, None, indices), label="h")]
    if op.args["mode"] != MAX and not op.args["scale_grad_by_freq"] and not op.args["sparse"]:
        factors.append(Factor(rows, (Carry(0), *rest), (None,) * 4, label="v"))
    return Rule(tuple(factors), localise=_local_bags, empty=False)


def _local_bags(op: Op, local: ShardCall):
    args = local.arguments(op)
    rest = [args.get(name) for name in ARGUMENTS]
    rows = local.in_partition(0, 0)
    if rows is not None:
        return local.ranked(bags_of_rows, *local.operands[:3], local.runs(rows), *rest)
    return local.ranked(bags_of_columns, *local.operands[:3], *rest) if local.split else local.unchanged(op)


def bags_of_columns(weight: Tensor, ids: Tensor, offsets: Tensor, *rest: Any, rank: int, tp: int) -> tuple[Tensor, ...]:
    """The bags of this rank's columns, and on rank 0 what is the same on all.

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
    """This rank's summand of the bags: of the rows that it holds.

    An id that the whole does not hold is one that no rank holds: all of them fail as the original does.

    Args:
        weight: this rank's rows, [rows here, columns]. ids: of the whole, [n]. offsets: where each bag begins.
        runs: how the rows are dealt. rest: as of `bags_of_columns`. rank, tp: this rank, of how many.

    Returns: the operator's results.
    """
    _, mode, _, scale, last, padding = rest
    index, mine = local_index(ids, runs, rank, tp)
    index = torch.where((ids >= 0) & (ids < runs.length), index, weight.shape[0])
    live = torch.ones_like(mine) if padding is None else ids != padding
    own = (mine & live).to(weight.dtype)
    own = own if scale is None else own * scale
    values, *numbers = aten.embedding_bag.padding_idx(weight, index, offsets, False, SUM, False, own, last, None)
    if mode == MEAN:
        ones, weights = weight.new_ones(1, 1), live.to(weight.dtype)
        few = aten.embedding_bag.padding_idx(
            ones, torch.zeros_like(ids), offsets, False, SUM, False, weights, last, None
        )
        values = values / few[0].clamp(min=1)
        numbers[1:] = [few[0][:, 0].to(ids.dtype)] * 2
    return (values, *_once(numbers, rank))


def _once(numbers: list[Tensor], rank: int) -> list[Tensor]:
    """Numbers that are the same on all ranks as summands: zeros on all but rank 0."""
    if rank == 0:
        return numbers
    return [torch.zeros_like(x) for x in numbers]
