"""Grouped matrix products of mixtures of experts: tokens sorted by expert, one weight for each."""

from __future__ import annotations

from autotp.layouts import divide

from .core import Carry, Factor, Op, Rule, aten, rule

ALIGNMENT = 16  # bytes: torch's kernel wants rows that start at multiples of it


@rule("transformers.grouped_mm_fallback.default", aten._grouped_mm.default)
def grouped_mm(op: Op) -> Rule:
    """`tk,ekn->tn`: columns and rows split; tokens and experts stay whole, for the groups' ends are data."""
    if [len(s) for s in op.ins] != [2, 3, 1]:
        return Rule()
    _, k, n = op.ins[1]
    block = ALIGNMENT // op.slots[1].meta["val"].itemsize if op.target is aten._grouped_mm.default else 1
    inner, outer = (Carry(d, unit=block) for d in (1, 2))
    factors = [(divide(k, block), (inner, inner, None), (None,)), (divide(n, block), (None, outer, None), (inner,))]
    linear = (frozenset({0}), frozenset({1}))
    return Rule(tuple(Factor(size, *carries) for size, *carries in factors if size is not None), linear, empty=False)
