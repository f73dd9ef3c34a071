"""Weights and state dicts that are others on one rank: one error on all of them, and nothing was changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))


def other(rank: int, world: int, group: Any, dp: int) -> dict[str, Any]:
    """What ranks are told of weights, a buffer, a state dict and a checkpoint that are others on rank 1."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")) if dp > 1 else mesh_of(group)
    options: dict[str, Any] = {"mesh": mesh, "dp": dp, "example_inputs": X}
    odd: Any = model(0)
    if rank:
        odd[1].running_mean.add_(1)
    found: dict[str, Any] = {
        "weights": error_of(lambda: autotp.compile(model(rank), **options)),
        "buffer": error_of(lambda: autotp.compile(odd, **options)),
    }
    loaded: Any = autotp.compile(model(rank), check=False, **options)  # for weights that come afterwards
    loaded.load_state_dict(model(0).state_dict())
    before = loaded.full_state_dict()
    states = model(rank).state_dict()
    found["state dict"] = error_of(lambda: loaded.load_state_dict(states))
    found["checkpoint"] = error_of(lambda: loaded.load_checkpoint(states))
    found["missing"] = error_of(lambda: loaded.load_state_dict({} if rank else model(0).state_dict()))
    after = loaded.full_state_dict()
    found["same"] = all(torch.equal(after[n], t) for n, t in before.items())
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_other_values_on_one_rank_are_an_error_on_all(pool, dp):
    one, two = pool.run(other, dp, world=2)
    for found in (one, two):
        for name in ("weights", "buffer", "state dict", "checkpoint"):
            kind, text, _ = found[name]
            assert kind == "RankError" and "rank 0: " in text, (name, text)
        assert "check=False" in found["weights"][1] and "0.weight" in found["weights"][1]
        assert "1.running_mean" in found["buffer"][1] and "0.weight" not in found["buffer"][1]
        assert found["same"]
    assert one["missing"][0] == "RankError" and "rank 1" in one["missing"][1]
    assert two["missing"][0] == "StateError"
