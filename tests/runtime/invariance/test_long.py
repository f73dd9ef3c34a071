"""Fifty steps of AdamW with clipping and accumulation, on every number of ranks up to eight, and on meshes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.processes import own_world

from .runs import different, trained

STEPS = 50
NONE: dict[str, Any] = {}


def on_ranks(
    rank: int, name: str, virtual: int, dp: int = 0, dtype: str = "float32", options: dict[str, Any] = NONE
) -> dict[str, Tensor]:
    mesh = None
    if dist.is_initialized():
        world = dist.get_world_size()
        sizes = {"dp": dp, "tp": world // dp} if dp else {"tp": world}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return trained(mesh, name, dtype, virtual, steps=STEPS, **options)


def test_fifty_steps_end_with_the_same_bits_on_up_to_eight_ranks_and_on_meshes():
    for name, virtual, worlds in (("kv2", 8, (2, 4, 8)), ("llama-uneven-short", 6, (2, 3, 6))):
        alone = trained(None, name, "float32", virtual, steps=STEPS)
        assert not torch.equal(alone["loss 0 0"], alone[f"loss {STEPS - 1} 1"])
        for world in worlds:
            for values in own_world.run(on_ranks, name, virtual, world=world):
                assert not (odd := different(alone, values)), (name, world, odd)
    options: Any = {"dp_invariant": 4, "repeats": 4}
    for dtype in ("float32", "bfloat16"):
        alone = trained(None, "kv2", dtype, 8, steps=STEPS, **options)
        for dp, tp in ((1, 1), (2, 2), (4, 2), (1, 8)):
            for rank, values in enumerate(own_world.run(on_ranks, "kv2", 8, dp, dtype, options, world=dp * tp)):
                assert not (odd := different(alone, values, dp, rank // tp)), (dtype, dp, tp, odd)
