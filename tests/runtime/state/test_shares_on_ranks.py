"""Ranks of unlike shares: steps of training, `generate()` with its caches, checkpoints to and from even degrees, and
the bytes that ranks of unlike memory allocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.runtime.state import pieces
from benchmarks.helpers.lists.generated import doubled
from tests.helpers.beside import states_differ
from tests.helpers.compare import mesh_of
from tests.helpers.grouped_heads import EXACT, generated, grouped, padded, step
from tests.helpers.models import redrawn
from tests.helpers.processes.pool import Pool

SHARES = {2: (2, 1), 3: (3, 2, 1)}
FUSED: dict[str, Any] = {"n_layer": 1, "n_embd": 48, "n_head": 6, "vocab_size": 31, "n_positions": 64}


def fused() -> Any:
    """A tied vocabulary, and q, k and v in one weight."""
    torch.manual_seed(0)
    config = GPT2Config(**FUSED, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return redrawn(GPT2LMHeadModel(config).double().eval())


# With the model that they shard: three ranks have heads of keys and values, two what is fused and tied.
MADE: dict[int, Any] = {2: fused, 3: lambda: grouped(6, 12, 48)}


@torch.no_grad()
def joined(sharded: Any) -> list[bool]:
    """Whether what is read of each weight of several shares is the memory that these lie in; and with a copy of one."""
    out = []
    for name, storage in sharded._shards.storages.items():
        parts = [x.to_local() for x in pieces(sharded._shards, name)]
        if len(parts) > 1 and storage.pieces[0].starts:
            first = next(x for x in parts if x.numel())
            apart = storage.local([first.clone(), *parts[1:]])
            out.append(storage.local(parts).data_ptr() == first.data_ptr() != apart.data_ptr())
            out.append(bool((apart == storage.local(parts)).all()))
    return out


def using(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    """Train, generate, save; and read that again by the saved plan."""
    model, batch, found = MADE[world](), padded(), dict[str, Any]()
    with doubled():
        options: dict[str, Any] = {"example_inputs": batch, "mesh": mesh_of(group)}
        sharded: Any = autotp.compile(model, shares=SHARES[world], **options)
        found["step"] = step(sharded, model, batch, fused=True)
        found["joined"] = joined(sharded)
    found["held"] = sum(x.to_local().numel() for x in sharded.parameters()) / sum(x.numel() for x in model.parameters())
    found["generate"] = generated(sharded, model, batch)
    sharded.save_checkpoint(f"{folder}/{world}")
    sharded.plan.save(f"{folder}/{rank}-{world}.json")
    again: Any = autotp.compile(MADE[world](), plan=autotp.Plan.load(f"{folder}/{rank}-{world}.json"), **options)
    again.load_checkpoint(f"{folder}/{world}")
    found["read"] = states_differ(again, model)
    return found


def otherwise(rank: int, world: int, group: Any, folder: str, wrote: int) -> float:
    """Read what unlike ranks wrote on another number of ranks, even or unlike, and write it for the next."""
    worst, states = 0.0, list[dict[str, Any]]()
    for shares in (None, SHARES[world]):
        sharded: Any = autotp.compile(MADE[wrote](), example_inputs=padded(), mesh=mesh_of(group), shares=shares)
        sharded.load_checkpoint(f"{folder}/{wrote}-even" if states else f"{folder}/{wrote}")
        sharded.save_checkpoint(f"{folder}/{wrote}-even")
        states.append({n: t.clone() for n, t in sharded.full_state_dict().items()})
        worst = max(worst, *(float((states[0][n] - t).abs().max()) for n, t in states[-1].items()))
    fresh = MADE[wrote]().state_dict()
    assert max(float((states[0][n] - t).abs().max()) for n, t in fresh.items()) > 1e-4  # it was trained
    return worst


def test_on_ranks(pool: Pool, tmp_path: Path):
    """At 2:1 and 3:2:1: two steps of AdamW with clipping, greedy and beam search, saved plans, and checkpoints."""
    for world, shares in SHARES.items():
        for rank, found in enumerate(pool.run(using, str(tmp_path), world=world)):
            assert max(found["step"]) < EXACT
            assert found["read"] < EXACT and all(found["joined"]) and len(found["joined"]) == {2: 0, 3: 32}[world]
            assert all(found["generate"][way] for way in ("greedy", "beams", "static", "own"))
            assert abs(found["held"] - shares[rank] / sum(shares)) < 0.1
        assert pool.run(otherwise, str(tmp_path), world, world=5 - world) == [0] * (5 - world)


def layers() -> tuple[Any, dict[str, Any]]:
    """A model of which next to all is weights, and what it is captured with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 768), torch.nn.GELU(), torch.nn.Linear(768, 64))
    return model, {"example_inputs": torch.randn(2, 64), "optimizer": "adamw", "check_capture": False}


def unlike_memory(*sizes: float) -> autotp.Cluster:
    """Machines that differ in nothing but the bytes that they hold."""
    local = autotp.Cluster.preset("local")
    return autotp.Cluster(ranks=[replace(local, memory_size=size, name=f"{size:.0f} B") for size in sizes])


def allocated(rank: int, world: int, group: Any, sizes: tuple[float, ...]) -> tuple[list[int], str]:
    """Bytes of the memory in which weights, gradients and states lie after a step: by the shares that are found, and by
    even ones on machines without limits; and what is said of even ones on these machines."""
    counts, said = [], ""
    for cluster, shares in ((unlike_memory(*sizes), None), (unlike_memory(*sizes), (1, 1)), ("local", None)):
        model, options = layers()
        try:
            sharded: Any = autotp.compile(model, mesh=mesh_of(group), cluster=cluster, shares=shares, **options)
        except autotp.AutoTPError as error:
            said = str(error)
            continue
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        sharded(options["example_inputs"]).square().mean().backward()
        optimizer.step()
        held = [x for p in sharded.parameters() for x in (p, p.grad, *optimizer.state[p].values())]
        memory = [getattr(x, "_local_tensor", x).untyped_storage() for x in held]
        counts.append(sum({x.data_ptr(): x.nbytes() for x in memory}.values()))
    return counts, said


def test_what_fits_only_unevenly_is_held_within_each_rank_s_memory(pool: Pool):
    """By the storages of all tensors; evenly it is refused with the reason, and would be more than there is."""
    model, options = layers()
    plan = autotp.plan(model, 2, cluster=unlike_memory(1e12, 2e12), **options)
    assert plan.share_choice is not None and not plan.shares
    most = max(plan.share_choice.memory)
    sizes = 1.6 * most, 0.6 * most
    for rank, ((uneven, even), said) in enumerate(pool.run(allocated, sizes, world=2)):
        assert 0.7 * sizes[rank] < uneven < sizes[rank]
        assert "shares=(1, 1) do not fit into the ranks of" in said and "rank 1 holds" in said
        assert rank == 0 or even > sizes[1]
