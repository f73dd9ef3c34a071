"""Experts over dp: rows travel to them, and what is learned is what one device learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralForCausalLM

import autotp
from autotp.cost import Cluster
from autotp.errors import CaptureError, InputError
from autotp.runtime import weight_reads
from autotp.runtime.checkpoint.archives import Archive
from autotp.runtime.storage import unwrap
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.modules.mixtures import Mixture, mixture, part, scores, tokens

STEPS, EXACT = 20, 1e-9
HALF = 3e-2  # of bfloat16, some roundings of 4e-3
FLOAT32 = 1e-4  # transformers computes norms and rotary embeddings in it, whatever the type, and AdamW blows that up


def training(
    rank: int, world: int, group: Any, name: str, dp: int, split: bool, steps: int = STEPS, ep: int = 0
) -> dict[str, float]:
    """Steps of AdamW with clipping beside those of one device, whose router sends all to two experts first."""
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    mine, model = mesh["dp"].get_local_rank(), mixture(name)
    if isinstance(model, Mixture):  # so that the ranks which have other experts get no row
        with torch.no_grad():
            model.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    sharded: Any = autotp.compile(
        model, dp=dp, mesh=mesh, example_inputs=part(tokens(), mine, dp), fully_shard=split, ep=ep or dp
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


@pytest.mark.parametrize(
    ("dp", "split", "ep"), [(2, False, 2), (4, True, 4), (4, False, 2)], ids=["2x2", "4x1-fully-sharded", "two-groups"]
)
def test_training_by_hand_is_that_of_one_device(pool, dp, split, ep):
    for worst in pool.run(training, "by hand", dp, split, STEPS, ep):
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
    fewer = ""
    try:
        autotp.compile(Mixture(experts=3), dp=2, ep=2, mesh=mesh, example_inputs=given, **options)
    except CaptureError as refusal:
        fewer = str(refusal)
    model: Any = mixture("mixtral", double=False).eval()
    generating: Any = autotp.compile(model, dp=2, ep=2, mesh=mesh, example_inputs=given, **options).eval()
    found: dict[str, Any] = {"longer": worst, "error": error, "fewer": fewer}
    # The first rank's prompt ends at once, and the other's goes on: from then on it alone has a request.
    rows = part(tokens(5, 2), mine, 2)
    asked: dict[str, Any] = {"max_new_tokens": 4, "use_cache": True, "do_sample": False, "pad_token_id": 0}
    asked |= {"eos_token_id": int(model.generate(**part(tokens(5, 2), 0, 2), **asked)[0, 6])}
    ends = [model.generate(**part(tokens(5, 2), lane, 2), **asked) for lane in range(2)]
    found["steps"], found["alone"] = [x.shape[1] for x in ends], generating.generate(**rows, **asked).equal(ends[mine])
    with torch.no_grad():  # of equal scores all tokens take the first two experts, which one rank has
        for each in (model, generating):
            each.load_state_dict({n: x * ("gate.weight" not in n) for n, x in model.state_dict().items()})
    found["one rank's"] = generating.generate(**rows, **asked).equal(model.generate(**rows, **asked))
    return found


def test_checkpoints_lengths_generation_and_one_error_on_all_ranks(pool, tmp_path):
    everyone = pool.run(going_on, str(tmp_path / "checkpoint"))
    assert all(found["longer"] < EXACT for found in everyone), everyone
    assert all(found["steps"] == [7, 10] and found["alone"] and found["one rank's"] for found in everyone), everyone
    assert {(found["error"], found["fewer"]) for found in everyone} == {(everyone[0]["error"], everyone[0]["fewer"])}
    assert "does not deal out the 3 experts" in everyone[0]["fewer"]
    assert "dp ranks [1] have an expert for" in everyone[0]["error"]


def held(sharded: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of this rank's experts, as they are allocated: of weights, gradients and the optimizer's states."""
    out = {"weights": 0, "gradients": 0, "states": 0, "others": 0}
    for name, p in sharded.named_parameters():
        if name.split("_part")[0] not in ("up", "down"):
            out["others"] += p.to_local().untyped_storage().nbytes()
            continue
        states = [x for x in optimizer.state[p].values() if x.ndim]
        for what, tensors in (("weights", [p]), ("gradients", [p.grad]), ("states", states)):
            out[what] += sum(x.to_local().untyped_storage().nbytes() for x in tensors)
    return out


def holding(rank: int, world: int, group: Any, pins: dict[str, Any], split: bool) -> list[dict[str, int]]:
    """What a rank holds without travelling, and with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given, out = part(tokens(), mesh["dp"].get_local_rank(), 2), []
    for ep in (1, 2):
        own: Any = {"check_capture": False, "pins": pins, "fully_shard": split}
        sharded: Any = autotp.compile(mixture("by hand"), dp=2, ep=ep, mesh=mesh, example_inputs=given, **own)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        sharded(**given).square().mean().backward()
        optimizer.step()
        out.append(held(sharded, optimizer))
    return out


@pytest.mark.parametrize(("dim", "split"), [(0, False), (None, True)], ids=["by-expert-over-tp", "fully-sharded"])
def test_a_rank_holds_its_own_experts(pool, dim, split):
    pins = {} if dim is None else {"up": Shard(dim), "down": Shard(dim)}
    for whole, own in pool.run(holding, pins, split):
        assert own["others"] == whole["others"] and whole["states"] == 2 * whole["weights"]
        ratio = 1 if split else 2  # what is split over dp besides is as small, and gathered
        assert all(ratio * own[what] == whole[what] for what in ("weights", "states")), (whole, own)
        assert own["gradients"] == own["weights"] < whole["gradients"], (whole, own)


def reading(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """A folder of single experts, and which of them a rank reads; then its state dicts, as others have them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, keys = mesh["dp"].get_local_rank(), []
    whole = Archive.whole

    def watched(self: Any, name: str) -> Any:
        keys.append(name)
        return whole(self, name)

    with patch.object(Archive, "whole", watched):
        own: Any = {"example_inputs": part(tokens(), mine, 2), "check_capture": False}
        sharded: Any = autotp.from_pretrained(folder, dp=2, ep=2, mesh=mesh, **own)
    model: Any = MixtralForCausalLM.from_pretrained(folder)
    found, wanted = sharded(**part(tokens(), mine, 2)).logits, model(**tokens()).logits.chunk(2)[mine].clone()
    numbers = {int(name.split("experts.")[1].split(".")[0]) for name in keys if "experts." in name}
    states: Any = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    again = model.state_dict()
    same = states.keys() == again.keys() and all(states[name].equal(t) for name, t in again.items())
    sharded.load_state_dict({name: 2 * t for name, t in again.items()})
    doubled = sharded.full_state_dict()
    return {
        "own": numbers <= {2 * mine, 2 * mine + 1}, "scores": difference(found, wanted), "states": same,
        "doubled": all(doubled[name].equal(2 * t) for name, t in again.items()),
    }  # fmt: skip


def test_single_experts_are_read_where_they_are(pool, tmp_path):
    mixture_model: Any = mixture("mixtral", double=False)
    mixture_model.save_pretrained(tmp_path)
    assert any("experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    for found in pool.run(reading, str(tmp_path)):
        assert found["own"] and found["scores"] < FLOAT32 and found["states"] and found["doubled"], found


def moving(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Weights to tp=4 and back, and the module onto other degrees with its optimizer, beside one device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, options = mesh["dp"].get_local_rank(), cast(Any, {"check_capture": False})
    sharded: Any = autotp.compile(
        mixture("by hand"), dp=2, ep=2, mesh=mesh, example_inputs=part(tokens(), mine, 2), **options
    )
    model, found = mixture("by hand"), dict[str, Any]()
    other: Any = autotp.compile(mixture("by hand"), mesh=mesh_of(group), example_inputs=tokens(), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, sharded)]

    def stepped(given: dict[str, Any]) -> float:
        for m, optimizer, inputs in zip((model, sharded), optimizers, (tokens(), given), strict=True):
            optimizer.zero_grad()
            m(**inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
        state = sharded.full_state_dict()
        return max(difference(state[n], t) for n, t in model.state_dict().items())

    found["before"] = stepped(part(tokens(), mine, 2))
    autotp.move(sharded, other)
    there = other.full_state_dict()
    found["moved"] = all(there[n].equal(t) for n, t in sharded.full_state_dict().items())
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    autotp.move(other, sharded)
    sharded.replan(1, dp=4, optimizer=optimizers[1])
    found["experts"] = [sharded.plan.batch.ep, tuple(dict(sharded.named_parameters())["up"].to_local().shape)]
    found["replanned"] = stepped(part(tokens(), rank, 4))
    return found


def test_weights_move_and_degrees_change(pool):
    for found in pool.run(moving):
        assert found["moved"] and found["experts"] == [4, (1, 16, 24)], found
        assert max(found["before"], found["replanned"]) < EXACT, found


def chosen(rank: int, world: int, group: Any) -> dict[str, Any]:
    """What rows a router sends where, measured; and the ep that every rank takes with that, and without."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model, mine = mixture("by hand"), part(tokens(), rank, 4)
    assert isinstance(model, Mixture)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    options = cast(Any, {"mesh": mesh, "example_inputs": mine, "check_capture": False, "dp": 4})
    sharded: Any = autotp.compile(model, ep=4, **options)
    measured = sharded.profile(mine)
    found: dict[str, Any] = {"imbalance": measured.imbalance, "loads": measured.loads, "text": str(measured)}
    slow = replace(Cluster.preset("h100"), devices_per_node=1, inter_bandwidth=1e6, inter_latency=1e-9)
    for imbalance in (1.0, 1e6):
        other: Any = autotp.compile(model, ep="auto", cluster=slow, imbalance=imbalance, **options)
        found[f"ep at {imbalance:g}"] = other.plan.batch.ep
        found[f"differs at {imbalance:g}"] = difference(other(**mine), model(**tokens()).chunk(4)[rank].clone())
    return found


def test_ranks_measure_an_imbalance_and_take_one_ep(pool):
    for found in pool.run(chosen):
        assert found["imbalance"] == 2.0 and set(found["loads"]) == {(24, 24, 0, 0)}, found
        assert "with most, over the mean: 2.00" in found["text"], found["text"]
        assert found["ep at 1"] in (1, 4) and found["ep at 1e+06"] == 1, found
        assert max(found["differs at 1"], found["differs at 1e+06"]) < EXACT, found


def stepped(sharded: Any, model: Any, mine: int) -> tuple[float, float]:
    """Differences of the gradients of two backwards, of which the second ends their sum, and of the norm."""
    with sharded.no_sync():
        sharded(**part(tokens(), mine, 2)).float().square().mean().backward()
    sharded(**part(tokens(1), mine, 2)).float().square().mean().backward()
    for seed in range(2):
        model(**tokens(seed)).float().square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (sharded, model)]
    return gradients_differ(sharded, model), difference(cast(Any, norms[0]).full_tensor(), norms[1])


def odd_uses(rank: int, world: int, group: Any) -> dict[str, Any]:
    """A type of its own for sums, all tokens to one expert, experts frozen at first, lengths that differ over dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, found = mesh["dp"].get_local_rank(), dict[str, Any]()
    own: Any = {"dp": 2, "mesh": mesh, "example_inputs": part(tokens(), mine, 2), "check_capture": False}
    for ep in (1, 2):
        half = mixture("by hand", double=False).bfloat16()
        sharded: Any = autotp.compile(half, ep=ep, reduce_dtype=torch.float32, **own)
        found[f"bfloat16, ep={ep}"] = stepped(sharded, half, mine)
        torch.optim.AdamW(sharded.parameters(), lr=1e-2).step()
    model = mixture("by hand")
    assert isinstance(model, Mixture)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([900.0, 0.0, 0.0, 0.0]))
    model.up.requires_grad_(False)
    sharded = autotp.compile(model, ep=2, **own)
    for m in (model, sharded):
        m.up.requires_grad_(True)
    found["one expert, trained later"] = max(stepped(sharded, model, mine))
    with patch.object(weight_reads, "unwrap", lambda parameters, owners: unwrap(parameters, [1] * len(owners))):
        for m in (model, sharded):
            m.zero_grad()
        found["left in sums"] = stepped(sharded, model, mine)[0]
    longer = tokens(2, 2, 6 + 3 * mine)["input_ids"]
    found["other lengths"] = difference(sharded(longer), model(longer))
    return found


def test_odd_uses_are_right(pool):
    for found in pool.run(odd_uses):
        assert found["one expert, trained later"] < EXACT and found["left in sums"] > 0.4, found
        here, there = found["bfloat16, ep=2"], found["bfloat16, ep=1"]
        assert max(here) < HALF and max(there) < HALF, found
        assert found["other lengths"] < EXACT, found
