"""More ranks than heads of keys and values: each head is whole on the ranks whose queries read it, and on no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.comm import collectives
from benchmarks.helpers.lists.generated import doubled
from tests.helpers.beside import states_differ
from tests.helpers.compare import difference, mesh_of
from tests.helpers.grouped_heads import EXACT, generated, grouped, padded, step
from tests.helpers.processes.pool import Pool


def using(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    model, batch = grouped(), padded()
    sharded: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group))
    found: dict[str, Any] = {"said": "each whole on 2 ranks" in str(sharded.plan)}
    found["step"] = step(sharded, model, batch)
    found["generate"] = generated(sharded, model, batch)
    sharded.save_checkpoint(f"{folder}/copied")
    sharded.plan.save(f"{folder}/plan-{rank}.json")
    plan = autotp.Plan.load(f"{folder}/plan-{rank}.json")
    again: Any = autotp.compile(grouped(), example_inputs=batch, mesh=mesh_of(group), plan=plan)
    again.load_checkpoint(f"{folder}/copied")
    found["read"] = states_differ(again, model), difference(again(**batch).logits, model(**batch).logits)
    with doubled():
        split: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group), sequence_parallel=True)
        found["sequence"] = step(split, model, batch)
        found["product"] = [named(model, batch, axes) for axes in ((2, 2), ("outer", "inner"))]
    found["control"] = uncopied(sharded, model, batch)
    return found


def named(model: Any, batch: dict[str, Tensor], axes: tuple[int | str, ...]) -> tuple[float, str]:
    """Difference over a product of two axes, given as numbers or by the names of a mesh's, and what its plan says."""
    names = ("outer", "inner")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if axes == names else None
    sharded: Any = autotp.compile(model, axes, example_inputs=batch, mesh=mesh)
    return difference(sharded(**batch).logits, model(**batch).logits), sharded.plan.to_json()


def uncopied(sharded: Any, model: Any, batch: dict[str, Tensor]) -> float:
    """How far a step is off where ranks of a group do not add up what they make of one head's gradient."""
    among = collectives._among

    def alone(primitive: Any, x: Tensor, *args: Any) -> Tensor:
        return among(primitive, x, *args) if primitive == "all_gather" else x.sum(0)

    collectives._among = alone
    try:
        return step(sharded, model, batch)[1]
    finally:
        collectives._among = among


def reading(rank: int, world: int, group: Any, folder: str) -> tuple[float, float]:
    """Read on two ranks, which have a head each, what four wrote, and write it again."""
    sharded: Any = autotp.compile(grouped(), example_inputs=padded(), mesh=mesh_of(group))
    sharded.load_checkpoint(f"{folder}/copied")
    before = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    sharded.save_checkpoint(f"{folder}/plain")
    fresh = grouped().state_dict()
    return max(float((before[n] - t).abs().max()) for n, t in fresh.items()), float(len(before))


def back(rank: int, world: int, group: Any, folder: str) -> float:
    """Read on four ranks what two wrote, beside what four wrote."""
    states = []
    for name in ("copied", "plain"):
        sharded: Any = autotp.compile(grouped(), example_inputs=padded(), mesh=mesh_of(group))
        sharded.load_checkpoint(f"{folder}/{name}")
        states.append({n: t.clone() for n, t in sharded.full_state_dict().items()})
    return max(float((states[0][n] - t).abs().max()) for n, t in states[1].items())


def test_on_ranks(pool: Pool, tmp_path: Path):
    """Two heads on four ranks: a step of training, `generate()` with its caches, saved plans and checkpoints; and four
    on three ranks, of which the last has none."""
    for found in pool.run(using, str(tmp_path)):
        assert found["said"]
        assert max(found["step"]) < EXACT
        assert max(found["sequence"]) < EXACT
        assert max(found["read"]) < EXACT
        for way in ("greedy", "beams", "static"):
            assert found["generate"][way] and found["generate"][f"{way} heads"] == 1
        assert found["generate"]["own"]
        (gap, plan), (by_name, again) = found["product"]
        assert max(gap, by_name) < EXACT
        assert plan == again
        assert found["control"] > 1e-3  # of gradients of keys and values
    moved = pool.run(reading, str(tmp_path), world=2)
    assert all(changed > 1e-4 for changed, _ in moved)  # what was trained, and not what a fresh model has
    assert max(pool.run(back, str(tmp_path))) == 0
    for rank, found in enumerate(pool.run(without_heads, world=3)):
        assert max(found["step"]) < EXACT
        for way in ("greedy", "beams", "static"):
            # A cache of a rank without heads has room for one: the cache's own classes ask for its size.
            assert found["generate"][way] and found["generate"][f"{way} heads"] == (2, 2, 1)[rank]


def test_a_product_says_which_ranks_share_a_head():
    """Four heads of keys on eight ranks: on two ranks each, or two of them on four ranks; and what divides nothing."""
    ids, local = padded(), {}
    for tp in (8, (4, 2), (2, 4)):
        report = autotp.verify(grouped(4, 8), tp, ids)
        assert report and report.plan is not None
        local[tp] = next(b.local for b in report.plan.blocks if b.kind == "attention")
    assert local[8] == local[4, 2] == "1 head, 1 kv head, each whole on 2 ranks"
    assert local[2, 4] == "1 head, 2 kv heads, each whole on 4 ranks"


def without_heads(rank: int, world: int, group: Any) -> dict[str, Any]:
    """A rank that has no head of four."""
    model, batch = grouped(4, 8), padded()
    sharded: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group), objective="decode")
    got: dict[str, Any] = {"generate": generated(sharded, model, batch)}
    with doubled():
        again: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group), plan=sharded.plan)
        return {**got, "step": step(again, model, batch)}


def test_a_rank_may_have_no_head():
    """Four heads on three ranks, two, two and none: half of the cache on each of the first."""
    report = autotp.verify(grouped(4, 8), 3, padded(), objective="decode", generate=2)
    assert report and report.plan is not None and report.decoded is not None
    whole = autotp.plan(grouped(4, 8), 1, example_inputs=padded(), objective="decode", check_capture=False)
    assert report.plan.memory.cache == whole.memory.cache / 2


class Latent(torch.nn.Module):
    """Attention of eight heads over one latent of sixteen numbers a token, with what expands it absorbed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up = (torch.nn.Linear(*sizes, bias=False) for sizes in ((32, 128), (32, 16), (128, 32)))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, latent = self.q(x).view(b, n, 8, 16).transpose(1, 2), self.down(x).unsqueeze(1)
        y = torch.nn.functional.scaled_dot_product_attention(q, latent, latent, is_causal=True, enable_gqa=True)
        return self.up(y.transpose(1, 2).reshape(b, n, 128))


def test_a_latent_is_whole_and_the_plan_says_why():
    plan = autotp.plan(Latent(), 4, example_inputs=torch.randn(2, 16, 32), objective="decode", check_capture=False)
    (block,) = (b for b in plan.blocks if b.kind == "attention")
    assert block.local.startswith("2 heads")
    assert block.limit == "1 kv head for 4 ranks: each has all of k and v in its attention"
    assert block.limit in plan.report()
