"""Fifty steps of AdamW with clipping and accumulation, on every number of ranks up to eight."""

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.processes import own_world

from .runs import trained

STEPS = 50


def on_ranks(rank: int, name: str, virtual: int) -> dict[str, Tensor]:
    return trained(dist.group.WORLD, name, "float32", virtual, steps=STEPS)


def test_fifty_steps_end_with_the_same_bits_on_up_to_eight_ranks():
    for name, virtual, worlds in (("kv2", 8, (2, 4, 8)), ("llama-uneven-short", 6, (2, 3, 6))):
        (alone,) = own_world.run(on_ranks, name, virtual, world=1)
        assert not torch.equal(alone["loss 0 0"], alone[f"loss {STEPS - 1} 1"])
        for world in worlds:
            for values in own_world.run(on_ranks, name, virtual, world=world):
                odd = [key for key in alone if not torch.equal(values[key], alone[key])]
                assert values.keys() == alone.keys() and not odd, (name, world, odd)
