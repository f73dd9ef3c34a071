"""Values without operands, of which each rank makes its part: of sizes alone, and random ones by an element's index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.op import Op
from autotp.ir.specs import Runs

if TYPE_CHECKING:
    from .local import ShardCall


def local_factory(op: Op, local: ShardCall):
    return local.call(op, {**local.arguments(op), "size": local.out_shape(op)}) if local.split else local.unchanged(op)


def local_part(op: Op, local: ShardCall) -> Any:
    """The whole's size stays; along the split dimension the part says where its elements are."""
    out, args = local.outs[0], local.arguments(op)
    if out.sharded_dim is None or out.distribution is None:
        return local.call(op, args)
    if "size" in args:
        args["size"] = local.out_shape(op)
    seed = local.operand(op.names.index("seed"))
    place = local.ranked(coordinates, seed, local.runs(out.distribution))
    return local.call(op, {**args, "place": place, "dim": out.sharded_dim})


def coordinates(like: Tensor, runs: Runs, *, rank: int, tp: int) -> Tensor:
    """Places in the whole of this rank's elements of a dealt dimension."""
    parts = [torch.arange(start, start + n, device=like.device) for start, n in runs.spans(rank, tp)]
    return torch.cat(parts)
