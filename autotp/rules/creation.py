"""Values without operands, of which each rank makes its part: from sizes alone, or random ones by element index."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.ir.marks import write
from autotp.ir.op import Op, aten
from autotp.ir.specs import Runs

if TYPE_CHECKING:
    from .local import ShardCall


PLACES = {"place": "dim", "other": "other_dim"}  # arguments with the elements' coordinates, and their dimensions


def local_factory(op: Op, local: ShardCall):
    return local.call(op, {**local.arguments(op), "size": local.out_shape(op)}) if local.split else local.unchanged(op)


def local_part(op: Op, local: ShardCall) -> Any:
    """Rewrite the call for a part: the size of the whole stays, and coordinates are passed along each split dimension.

    An axis that was sharded before may have split the same dimension, of which this is then a part, or another one.
    """
    out, args = local.outs[0], local.arguments(op)
    if out.sharded_dim is None or out.distribution is None:
        return local.call(op, args)
    if "size" in args:
        args["size"] = local.out_shape(op)
    seed = local.operands[op.names.index("seed")]
    place = local.ranked(coordinates, seed, local.runs(out.distribution))
    fake = op.node.meta["val"]
    place.meta["val"] = fake.new_empty((fake.shape[out.sharded_dim],), dtype=torch.int64)
    write(place, layout=replace(out, dim=0))  # type: ignore[call-arg]  # from which the next axis knows the local size
    name = next((n for n in PLACES if args[n] is not None and args[PLACES[n]] == out.sharded_dim), None)
    if name is not None:
        place = local.emit(aten.index_select.default, (args[name], 0, place))
    name = name or next(n for n in PLACES if args[n] is None)  # dp has seeds of its own, so that two axes are all
    return local.call(op, {**args, name: place, PLACES[name]: out.sharded_dim})


def coordinates(like: Tensor, runs: Runs, *, rank: int, tp: int) -> Tensor:
    """Return the coordinates in the whole of this rank's elements of a sharded dimension."""
    parts = [torch.arange(start, start + n, device=like.device) for start, n in runs.spans(rank, tp)]
    return torch.cat(parts)
