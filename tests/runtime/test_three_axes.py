"""Batch over dp, sequences over cp and weights over tp, on one mesh: losses and gradients are those of one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from autotp.passes.shard import batch_axis
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.errors import message_of
from tests.helpers.modules.two_axes import model_of, slice_of

DP, CP = 2, 2


def mesh_of(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (DP, CP, tp), mesh_dim_names=("dp", "cp", "tp"))


def three_axes(rank: int, world: int, group: Any, name: str, split: bool) -> dict[str, Any]:
    """The decoder and Bert have a loss inside, a mean over tokens that count; ESM one of its own rank's tokens."""
    mesh, (model, whole) = mesh_of(world // 4), model_of(name)
    at, part, inside = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank(), name != "esm"
    mine = slice_of(whole, at)
    sharded: Any = autotp.compile(model, mesh, fully_shard=split, example_inputs=mine)
    found, wanted = sharded(**mine), model(**whole)
    losses = [x[0] if inside else x[0].square().mean() for x in (found, wanted)]
    for loss in losses:
        loss.backward()
    scores = autotp.Inputs(wanted[int(inside)].chunk(DP)[at]).part(part, CP).args[0]
    return {
        "loss": difference(*losses) if inside else 0.0,
        "scores": difference(found[int(inside)], scores),
        "gradients": gradients_differ(sharded, model),
        "part": sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters()),
        "again": again(model, sharded, mesh, mine),
    }


def again(model: nn.Module, sharded: Any, mesh: DeviceMesh, mine: dict[str, torch.Tensor]) -> float:
    """The plan from its text, which brings its axes along."""
    loaded = autotp.Plan.from_json(sharded.plan.to_json())
    other: Any = autotp.compile(model, plan=loaded, mesh=mesh, example_inputs=mine)
    assert loaded.batch == sharded.plan.batch and loaded.batch.degrees == {"dp": DP, "cp": CP}
    with torch.no_grad():
        return difference(other(**mine)[0], sharded(**mine)[0])


def held(pool: Any, name: str, split: bool, most: float, world: int = 4) -> None:
    for found in pool.run(three_axes, name, split, world=world):
        assert max(found["loss"], found["scores"], found["gradients"], found["again"]) < 1e-10, found
        assert found["part"] < most, found


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fully-sharded"])
def test_losses_and_gradients_are_those_of_one_device(pool, split):
    held(pool, "decoder", split, 0.26 if split else 1.01)


def test_eight_ranks_of_three_axes(pool):
    held(pool, "bert", True, 0.15, world=8)
    held(pool, "esm", False, 0.56, world=8)


def started(rank: int, world: int, group: Any, text: str) -> dict[str, Any]:
    """A step by the plan of a choice alone, which says what the world is."""
    model, batch = model_of("decoder")
    whole = {name: torch.cat([x, x.flip(0)]) for name, x in batch.items()}
    sharded: Any = autotp.compile(model, plan=autotp.Plan.from_json(text), example_inputs=slice_of(whole, rank // 2))
    losses = sharded(**slice_of(whole, rank // 2))[0], model(**whole)[0]
    for loss in losses:
        loss.backward()
    return {"loss": difference(*losses), "gradients": gradients_differ(sharded, model)}


def test_the_best_row_of_a_choice_is_what_its_plan_starts(pool):
    model, batch = model_of("decoder")
    choice = autotp.plan(model, devices=4, global_batch=8, example_inputs=batch, check_capture=False)
    best, plan = choice.best, choice.plan
    assert best is not None and best.mesh.degrees == (1, 2, 2, 1)
    assert plan is not None and plan.batch.degrees == {"dp": 2, "cp": 2}
    assert plan.batch.fully_shard == best.mesh.fully_shard and "dp=2, cp=2" in best.call
    for found in pool.run(started, plan.to_json()):
        assert max(found.values()) < 1e-10, found


def unscaled(rank: int, world: int, group: Any) -> dict[str, Any]:
    with patch.object(batch_axis, "scale_gradient", lambda x, factor: x):
        return three_axes(rank, world, group, "decoder", False)


def test_without_the_sum_over_both_axes_gradients_are_a_quarter(pool):
    """The negative control."""
    for found in pool.run(unscaled):
        assert found["loss"] < 1e-10 and found["gradients"] > 0.7, found


def refusing(rank: int, world: int, group: Any) -> str:
    """What this rank is told of a call whose cp ranks were given different inputs, after one that is right."""
    mesh, (model, whole) = mesh_of(1), model_of("decoder")
    own, at = slice_of(whole, mesh["dp"].get_local_rank()), dist.get_rank()
    sharded: Any = autotp.compile(model, mesh, example_inputs=own)
    rolled = {**own, "input_ids": own["input_ids"].roll(at % CP, 0)}  # other sequences on the cp ranks of one slice
    with torch.no_grad():
        assert difference(sharded(**own)[0], model(**whole)[0]) < 1e-10
        return message_of(lambda: sharded(**rolled))


def test_other_sequences_on_cp_ranks_are_refused_on_every_rank(pool):
    for told in pool.run(refusing):
        assert "The cp and tp ranks do not agree on the values of the inputs" in told
