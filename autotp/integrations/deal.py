"""How accelerate deals out batches to ranks, where some of them are one tp group and take the same one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autotp.errors import InputError
from autotp.runtime.module import ShardedModule

HOW = "Compile it over all ranks, with tp ranks that follow each other: autotp.compile(model, tp=..., dp=...)."


class Parallelism(ParallelismConfig):
    """Says to accelerate which ranks share a sharded module's batches, on every device.

    Args:
        model: the sharded module.

    Raises:
        InputError: it is none, or its ranks are not all there are in the order in which accelerate counts them.
    """

    def __init__(self, model: ShardedModule) -> None:
        tp, dp = sizes_of(model)
        super().__init__(tp_size=tp, dp_shard_size=dp)
        ranks = model._shards.ranks
        world = dist.get_world_size() if ranks is not None else 1
        place = divmod(dist.get_rank(), tp) if ranks is not None else (0, 0)
        own = (ranks.batch.rank if ranks.batch is not None else 0, ranks.rank) if ranks is not None else (0, 0)
        if world != tp * dp or place != own:
            raise InputError(
                f"accelerate and transformers' Trainer deal out batches to all {world} ranks, and this sharded module "
                f"is at place {own} of {dp} x {tp} on rank {place[0] * tp + place[1]}. {HOW}"
            )
        if ranks is not None and world > 1:
            names = {"dp_shard": dp, "tp": tp}
            used = {name: size for name, size in names.items() if size > 1}
            self.device_mesh = init_device_mesh(ranks.device.type, tuple(used.values()), mesh_dim_names=tuple(used))

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh of the module's ranks; None of a single one."""
        return self.device_mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Nothing: accelerate allows meshes on accelerators alone, and what is dealt out by this one is so anywhere."""


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
            "Compile it with dp, or write the loop with autotp.Inputs.part."
        )
    return shards.tp, shards.axis.size


def each_once(gathered: Any, tp: int) -> Any:
    """Of tensors that were gathered from all ranks along their first dimension, one block of each tp group."""

    def once(value: Tensor) -> Tensor:
        blocks = value.unflatten(0, (-1, tp, value.shape[0] // dist.get_world_size()))
        return blocks[:, 0].flatten(0, 1)

    return recursively_apply(once, gathered) if tp > 1 else gathered
