"""A state that one rank has pickled for all ranks is refused on all of them when it is read."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate.checkpointing import save_accelerator_state
from torch import nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of


def stepped(module: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    return optimizer


def loading(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, example_inputs=torch.ones(2, 8), mesh=mesh_of(group))
    optimizer = stepped(sharded)
    torch.save((optimizer.state_dict(), sharded.state_dict()), f"{folder}/{rank}")
    dist.barrier(group)
    found: dict[str, Any] = {}
    for name, file in (("own", rank), ("first", 0)):
        states, weights = torch.load(f"{folder}/{file}")
        found[f"weights {name}"] = error_of(lambda weights=weights: sharded.load_state_dict(weights))[:2]
        fresh = torch.optim.AdamW(sharded.parameters(), lr=0.1)
        for each in (fresh, optimizer):  # one that has not stepped yet, and one that has
            each.load_state_dict(copy.deepcopy(states))
            found[f"{name} {each is fresh}"] = error_of(each.step)[:2]
    save_accelerator_state(folder, [], [stepped(sharded)], [], [], rank, 0)  # writes what the first rank has, for all
    dist.barrier(group)
    fresh = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    fresh.load_state_dict(torch.load(f"{folder}/optimizer.bin"))
    found["first of accelerate"] = error_of(fresh.step)[:2]
    return found


def test_a_part_that_another_rank_pickled_is_refused_on_all(pool, tmp_path):
    for rank, found in enumerate(pool.run(loading, str(tmp_path), world=2)):
        assert all(found[name] == ("", "") for name in ("weights own", "own True", "own False")), found
        for name in ("weights first", "first True", "first False"):
            kind, text = found[name]
            assert kind == ("StateError" if rank else "RankError") and "save_checkpoint" in text, (name, found)
        kind, text = found["first of accelerate"]  # whose file is of the rank that wrote it last
        assert kind in ("StateError", "RankError") and "save_checkpoint" in text, text
