"""Values made from sizes alone: every rank makes its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.ir.op import Op, Rule, aten

from .core import loops, rule

if TYPE_CHECKING:
    from .local import ShardCall


@rule(aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
def factory(op: Op) -> Rule:
    return loops(op, [], [list(range(len(op.outs[0])))], localise=_local_factory)


def _local_factory(op: Op, local: ShardCall):
    shape = [local.out_length(0, d, n) for d, n in enumerate(op.outs[0])]
    return local.call(op, {**local.arguments(op), "size": shape}) if local.split else local.unchanged(op)


@rule(aten.arange, aten.eye.default, aten.eye.m, aten.linspace.default, aten.tril_indices, aten.triu_indices)
def numbered(op: Op) -> Rule:
    """The values depend on the position, so every rank makes them all; taking its slice is free."""
    return Rule()
