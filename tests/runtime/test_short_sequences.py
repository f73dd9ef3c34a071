"""A module planned with sequence parallelism takes sequences that cannot be dealt out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import difference, gradients_differ, mesh_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(24, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def short(rank: int, world: int, group: Any) -> dict[int, Any]:
    torch.manual_seed(0)
    model, found = Block().double(), {}
    ids = torch.randint(24, (2, 6))
    sharded: Any = autotp.compile(model, example_inputs=ids, mesh=mesh_of(group), sequence_parallel=True)
    for length in (1, 0, 3):
        outputs = [m(ids[:, :length]) for m in (sharded, model)]
        assert outputs[0].shape == outputs[1].shape
        if length:
            for m, y in zip((sharded, model), outputs, strict=True):
                m.zero_grad()
                y.square().mean().backward()
            found[length] = difference(*outputs), gradients_differ(sharded, model)
    return found


def test_one_token_and_none_are_computed_whole(pool):
    for found in pool.run(short, world=2):
        assert found.keys() == {1, 3} and max(max(x) for x in found.values()) < 1e-10, found
