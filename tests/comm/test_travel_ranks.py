"""Experts over dp: rows travel to them, and what is learned is what one device learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.errors import InputError
from tests.helpers.compare import difference, gradients_differ, mesh_of
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


class Renumbering(TorchDispatchMode):
    """A router that names experts by numbers which are larger by so many."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (out[0], out[1] + self.more) if func is torch.ops.aten.topk.default else out


def going_on(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """After a step: a checkpoint on another mesh, a longer batch, generation, a router that is wrong on one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, given = mesh["dp"].get_local_rank(), part(tokens(), mesh["dp"].get_local_rank(), 2)
    options: Any = {"check_capture": False}
    sharded: Any = autotp.compile(mixture("by hand"), dp=2, ep=2, mesh=mesh, example_inputs=given, **options)
    other: Any = autotp.compile(mixture("by hand"), mesh=mesh_of(group), example_inputs=tokens(), **options)
    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, other))
    sharded(**given).square().mean().backward()
    first.step()
    sharded.save_checkpoint(folder, optimizer=first)
    other.load_checkpoint(folder, optimizer=second)
    longer = tokens(3, 8, 9)
    worst = difference(sharded(**part(longer, mine, 2)), other(**longer).chunk(2)[mine].clone())
    error = ""
    try:
        with Renumbering(3 * mine):
            sharded(**given)
    except InputError as refusal:
        error = str(refusal)
    model: Any = mixture("mixtral", double=False).eval()
    generating: Any = autotp.compile(model, dp=2, ep=2, mesh=mesh, example_inputs=given, **options).eval()
    asked: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    new = generating.generate(**given, **asked)
    return {"longer": worst, "error": error, "new": new.equal(model.generate(**tokens(), **asked).chunk(2)[mine])}


def test_checkpoints_lengths_generation_and_one_error_on_all_ranks(pool, tmp_path):
    everyone = pool.run(going_on, str(tmp_path / "checkpoint"))
    assert all(found["longer"] < EXACT and found["new"] for found in everyone), everyone
    assert {found["error"] for found in everyone} == {everyone[0]["error"]}
    assert "dp ranks [1] have an expert for" in everyone[0]["error"]
