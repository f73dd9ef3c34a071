"""Grouped matrix products of mixtures of experts: tokens sorted by expert, one weight for each."""

from __future__ import annotations

from .core import Op, Rule, aten, einsum, rule


@rule("transformers.grouped_mm_fallback.default", aten._grouped_mm.default)
def grouped_mm(op: Op) -> Rule:
    """Each expert's own columns and rows split; tokens and experts stay whole, for the groups' ends are data."""
    if [len(s) for s in op.ins] != [2, 3, 1]:
        return Rule()
    found = einsum(op, "tk,ekn,e->tn")
    free = tuple(
        f for f in found.factors if any(c is not None and (i, c.dim) in ((1, 1), (1, 2)) for i, c in enumerate(f.ins))
    )
    return Rule(free)
