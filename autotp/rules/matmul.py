"""Contractions whose loops depend on an argument, products by group, and systems of equations."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.layouts import divide
from autotp.ir.op import EXPERTS, Carry, Factor, Op, Rule, aten
from autotp.ir.specs import Runs

from .core import rule
from .notation import einsum

if TYPE_CHECKING:
    from .local import ShardCall


@rule(aten.einsum.default)
def torch_einsum(op: Op) -> Rule:
    equation = op.args["equation"].replace(" ", "")
    if "->" not in equation:
        letters = [c for c in equation if c.isalpha()]
        equation += "->" + "..." * ("..." in equation) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    if any(len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in equation.split("->")[0].split(",")):
        return Rule()  # a repeated letter takes a diagonal
    left, _, right = equation.partition("->")
    base = einsum(op, f"{left.replace(',', ';')}->{right}")
    return replace(base, linear=tuple(frozenset({i}) for i in range(len(op.ins))))


@rule(aten.inner)
def inner(op: Op) -> Rule:
    a, b = (len(s) for s in op.ins)
    if not a or not b:
        return einsum(op, "...->...", linear="self or other")
    left, right = string.ascii_lowercase[: a - 1], string.ascii_uppercase[: b - 1]
    return einsum(op, f"{left}z,{right}z->{left}{right}", linear="self or other")


ALIGNMENT = 16  # bytes: torch's kernel wants rows that start at multiples of it
ROWS = Carry(0, groups=2)


@rule("transformers.grouped_mm_fallback.default", aten._grouped_mm.default)
def grouped_mm(op: Op) -> Rule:
    """Make the rule `tk,ekn->tn`: columns and rows split within each expert, or experts split with their tokens."""
    if [len(s) for s in op.ins] != [2, 3, 1]:
        return Rule()
    experts, k, n = op.ins[1]
    block = ALIGNMENT // op.slots[1].meta["val"].itemsize if op.target is aten._grouped_mm.default else 1
    inner, outer = (Carry(d, unit=block) for d in (1, 2))
    # By expert, a rank reads its own rows alone, so the others may be present, and writes zeros there: also a summand.
    rows = [(None, ROWS), (ROWS, ROWS), (ROWS, None)]
    by_expert = [Factor(experts, (x, Carry(0), None), (y,), label=EXPERTS, copies=2) for x, y in rows]
    within = [
        (divide(k, block), (inner, inner, None), (None,)),
        (divide(n, block), (None, outer, None), (inner,)),
    ]
    linear = (frozenset({0}), frozenset({1}))
    of_columns = [Factor(size, *carries) for size, *carries in within if size is not None]
    return Rule((*by_expert, *of_columns), linear, localise=_local_groups, empty=False)


def _local_groups(op: Op, local: ShardCall):
    experts = local.in_partition(1, 0)
    if experts is None:
        return local.unchanged(op)
    rest = tuple(op.args.values())[len(op.slots) :]
    return local.ranked(own_groups, str(op.target), *local.operands, local.runs(experts), *rest)


def own_groups(
    kernel: str, x: Tensor, weight: Tensor, ends: Tensor, groups: Runs, *rest: Any, rank: int, tp: int
) -> Tensor:
    """Compute the grouped product for the groups whose weights this rank has; zeros in the rows of the others.

    The rank's rows are moved to the front, where the kernel expects the first group. The rows after the last group,
    and their gradients, are undefined: they are masked on both sides.

    Args:
        kernel: the operator's name below `torch.ops`. x: all rows, sorted by group, [rows, k].
        weight: of this rank's groups, [groups here, k, n]. ends: the row after each group's last, [groups].
        groups: their distribution. rest: further arguments of the operator. rank, tp: this rank, of how many.

    Returns: [rows, n].
    """
    ((start, mine),) = groups.spans(rank, tp)
    before = ends[start - 1] if start else ends.new_zeros(())
    rows = torch.arange(x.shape[0], device=x.device)
    mask = (rows < ends[start + mine - 1] - before).unsqueeze(-1)
    front = torch.where(mask, x.index_select(0, (rows + before) % x.shape[0]), 0)
    operators: Any = torch.ops
    function = reduce(getattr, kernel.split("."), operators)
    product = function(front, weight, (ends[start : start + mine] - before).to(ends.dtype), *rest)
    return torch.where(mask, product, 0).index_select(0, (rows - before) % x.shape[0])


@rule(aten.linalg_solve.default)
def solved(op: Op) -> Rule:
    """Make the rule of many systems, which are independent, as are the right sides of one; linear in these."""
    if len(op.ins[0]) != len(op.ins[1]):
        return Rule()
    sides = "...__,..._n->..._n" if op.args["left"] else "...__,...n_->...n_"
    return einsum(op, sides, linear="B", empty=False)
