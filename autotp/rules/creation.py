"""Values without operands, of which each rank makes its part: of sizes alone, and random ones by an element's index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.op import Op, Rule, aten
from autotp.ir.specs import Runs
from autotp.kernels.operators import OPS

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


@rule(OPS.counter_uniform.default)
def uniform(op: Op) -> Rule:
    return loops(op, [[] for _ in op.ins], [list(range(len(op.outs[0])))], localise=_local_part)


@rule(OPS.counter_dropout.default)
def dropout(op: Op) -> Rule:
    """Linear in what is dropped: every rank has the same mask."""
    labels = list(range(len(op.outs[0])))
    others = [[] for _ in op.ins[1:]]
    return loops(op, [labels, *others], [labels], linear=(frozenset({0}),), localise=_local_part)


def _local_part(op: Op, local: ShardCall) -> Any:
    """The whole's size stays; along the split dimension the part says where its elements are."""
    out, args = local.outs[0], local.arguments(op)
    if out.sharded_dim is None or out.distribution is None:
        return local.call(op, args)
    if "size" in args:
        args["size"] = [local.out_length(0, d, n) for d, n in enumerate(op.outs[0])]
    seed = local.operand(op.names.index("seed"))
    place = local.ranked(coordinates, seed, local.runs(out.distribution))
    return local.call(op, {**args, "place": place, "dim": out.sharded_dim})


def coordinates(like: Tensor, runs: Runs, *, rank: int, tp: int) -> Tensor:
    """Places in the whole of this rank's elements of a dealt dimension."""
    parts = [torch.arange(start, start + n, device=like.device) for start, n in runs.spans(rank, tp)]
    return torch.cat(parts)
