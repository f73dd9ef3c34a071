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


def unscaled(rank: int, world: int, group: Any) -> dict[str, Any]:
    with patch.object(batch_axis, "scale_gradient", lambda x, factor: x):
        return three_axes(rank, world, group, "decoder", False)


def test_without_the_sum_over_both_axes_gradients_are_a_quarter(pool):
    """The negative control."""
    for found in pool.run(unscaled):
        assert found["loss"] < 1e-10 and found["gradients"] > 0.7, found


def refusing(rank: int, world: int, group: Any) -> dict[str, str]:
    """What this rank is told, before anything is captured, and of calls whose ranks were given different inputs."""
    model, whole = model_of("decoder")
    mesh, order = mesh_of(1), torch.arange(4)
    turned = DeviceMesh("cpu", order.view(2, 1, 2), mesh_dim_names=("cp", "tp", "dp"))
    other = DeviceMesh("cpu", order.view(2, 2), mesh_dim_names=("rows", "tp"))

    def told(**asked: Any) -> str:
        with patch("autotp.capture.capture.capture", side_effect=AssertionError("it is captured")):
            return message_of(lambda: autotp.compile(model, example_inputs=slice_of(whole, 0), **asked))

    odd = slice_of({k: v[:, :14] for k, v in whole.items()}, 0)
    found = {
        "too many": told(tp=3, dp=2, cp=2),
        "too few": told(tp=1, dp=2),
        "a size": told(dp=2, cp=4, mesh=mesh),
        "twice": told(tp=mesh, dp=2),
        "two meshes": told(tp=mesh, mesh=mesh),
        "order": told(dp=2, cp=2, mesh=turned),
        "order of all": told(tp=turned),
        "names": told(tp=other),
        "length": message_of(lambda: autotp.compile(model, mesh, example_inputs=odd)),
        "no batch": message_of(lambda: autotp.compile(nn.Linear(2, 2), mesh)),
    }
    own, at = slice_of(whole, mesh["dp"].get_local_rank()), dist.get_rank()
    sharded: Any = autotp.compile(model, mesh, example_inputs=own)
    rolled = {**own, "input_ids": own["input_ids"].roll(at % CP, 0)}  # other sequences on the cp ranks of one slice
    with torch.no_grad():
        wanted = model(**whole)[0]
        found["right"] = "" if difference(sharded(**own)[0], wanted) < 1e-10 else "wrong"
        found["sequences"] = message_of(lambda: sharded(**rolled))
    return found


SAID = {
    "too many": "dp=2, cp=2 and tp=3 do not make up the world of ",
    "too few": "dp=2 and tp=1 do not make up the world of ",
    "a size": "cp=4 needs a mesh with a dimension 'cp' of that size, and it has one of 2",
    "twice": "the axis dp is named twice: the mesh has dp=2, and dp=2 is given too",
    "two meshes": "the mesh is given twice",
    "order": "the axes in the order cp, tp, dp, and it is dp, cp, tp",
    "order of all": "the axes in the order cp, tp, dp, and it is dp, cp, tp",
    "names": "named ('rows', 'tp'), and one that gives the degrees has some of dp, cp and tp",
    "length": "a sequence of 14 is not dealt to 2 ranks in two chunks each: its length must be a multiple of 4",
    "no batch": "dp=2 x cp=2 needs example_inputs, one rank's slice of a batch, of whole sequences",
    "right": "",
    "sequences": "The cp and tp ranks do not agree on the values of the inputs",
}


def test_what_does_not_fit_is_refused_on_every_rank(pool):
    everyone = pool.run(refusing)
    for case, said in SAID.items():
        for told in everyone:
            assert said in told[case] and bool(said) == bool(told[case]), (case, told[case])
