"""Which ranks take batches of their own, and which share one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.utils import gather, recursively_apply
from torch import Tensor

from autotp.comm.lockstep import meet_everywhere
from autotp.errors import InputError
from autotp.runtime.module import ShardedModule


def sizes_of(model: Any) -> tuple[int, int]:
    """The degrees of tensor and data parallelism.

    Raises:
        InputError: it is no sharded module, or one that is not sharded before its first call.
    """
    if not isinstance(model, ShardedModule):
        raise InputError(
            f"{type(model).__name__} is no sharded module: give what autotp.compile(model, ...) returned, itself and "
            "not inside another module. One without autotp goes to the library's own class."
        )
    shards = model._shards
    if shards.axis.name == "cp":
        raise InputError(
            "The module deals sequences out over cp, and accelerate and transformers' Trainer deal out batches alone. "
            "Compile it with dp, or write the loop yourself, passing whole sequences on every rank."
        )
    return shards.tp, shards.axis.size


def each_once(values: Any, tp: int, dp: int) -> Any:
    """What the ranks have, once for each tp group. A collective call where there are several.

    Args:
        values: tensors with a first dimension of rows, and what holds them; with lists of other objects, those.
        tp, dp: the degrees.
    """
    if dp == 1:
        return values
    meet_everywhere("gather of accelerate")
    try:
        return recursively_apply(lambda rows: _blocks(gather(rows), tp), values, error_on_other_type=True)
    except TypeError:  # not tensors alone
        everyone: list[Any] = [None] * (tp * dp)
        dist.all_gather_object(everyone, values)
        return [one for each in everyone[::tp] for one in each]


def _blocks(gathered: Any, tp: int) -> Tensor:
    """Of rows that were gathered from all ranks, those of the first rank of each tp group."""
    blocks = gathered.unflatten(0, (-1, tp, gathered.shape[0] // dist.get_world_size()))
    return blocks[:, 0].flatten(0, 1)
