"""Experts over dp: rows travel to them, and what is learned is what one device learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autotp
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.modules.mixtures import Mixture, mixture, part, scores, tokens

STEPS, EXACT = 20, 1e-9
FLOAT32 = 1e-4  # transformers computes norms and rotary embeddings in it, whatever the type, and AdamW blows that up


def training(
    rank: int, world: int, group: Any, name: str, dp: int, split: bool, steps: int = STEPS
) -> dict[str, float]:
    """Steps of AdamW with clipping beside those of one device, whose router sends all to two experts first."""
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    mine, model = mesh["dp"].get_local_rank(), mixture(name)
    if isinstance(model, Mixture):  # so that the ranks which have other experts get no row
        with torch.no_grad():
            model.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    sharded: Any = autotp.compile(
        model, dp=dp, mesh=mesh, example_inputs=part(tokens(), mine, dp), fully_shard=split, ep=dp
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, sharded)]
    worst: dict[str, float] = {"scores": 0.0, "gradients": 0.0, "norms": 0.0}
    for step in range(steps):
        whole = tokens(step)
        found, wanted = scores(sharded(**part(whole, mine, dp))), scores(model(**whole))
        for out in (found, wanted):
            out.square().mean().backward()
        worst["scores"] = max(worst["scores"], difference(found, wanted.chunk(dp)[mine].clone()))
        worst["gradients"] = max(worst["gradients"], gradients_differ(sharded, model))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, sharded)]
        full = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        worst["norms"] = max(worst["norms"], difference(full, norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = sharded.full_state_dict()
    worst["weights"] = max(difference(state[n], t) for n, t in model.state_dict().items() if n in state)
    return worst


@pytest.mark.parametrize(("dp", "split"), [(2, False), (4, True)], ids=["2x2", "4x1-fully-sharded"])
def test_training_by_hand_is_that_of_one_device(pool, dp, split):
    for worst in pool.run(training, "by hand", dp, split):
        assert max(worst.values()) < EXACT, worst


def test_training_of_transformers_is_that_of_one_device(pool):
    """The other mixtures are proved on simulated ranks (`tests/proof/test_travel.py`)."""
    for worst in pool.run(training, "gpt-oss", 4, False, 3):
        assert max(worst.values()) < FLOAT32, worst
