"""Meshes, degrees and batches that do not fit are refused by one sentence, before anything is captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from tests.helpers.errors import message_of

WORLD = 4
TOKENS = torch.arange(16).view(2, 8) % 8


class Model(nn.Module):
    """Two blocks over the sequences of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def named(*names: str) -> DeviceMesh:
    """A mesh whose names torch's own function would refuse."""
    mesh = of(2, 2, names=("a", "b"))
    mesh._mesh_dim_names = names
    return mesh


def compiled(*args: Any, ids: Any = TOKENS, **keywords: Any) -> Any:
    return autotp.compile(Model(), *args, example_inputs=ids, **keywords)


def planned(*args: Any, ids: Any = TOKENS, **keywords: Any) -> Any:
    return autotp.plan(Model(), *args, example_inputs=ids, **keywords)


@cache
def plan_of(**axes: int) -> autotp.Plan:
    """A plan that a row is given, which is made before."""
    keywords: Any = axes
    return planned(2, check_capture=False, **keywords)


def verified(*args: Any, ids: Any = TOKENS, **keywords: Any) -> Any:
    verify: Any = autotp.verify
    return verify(Model(), *args, ids, **keywords)


def staged(*args: Any, ids: Any = TOKENS, **keywords: Any) -> Any:
    return autotp.stages(Model(), *args, example_inputs=ids, **keywords)


# What a user calls on four ranks, and what he is told.
ON_RANKS: dict[str, tuple[Callable[[], Any], str]] = {
    "compile, degrees": (lambda: compiled(2, dp=3), "dp=3 and tp=2 do not make up the world of 4 ranks"),
    "compile, three degrees": (lambda: compiled(2, dp=2, cp=2), "dp x cp x tp must be 4"),
    "compile, a plan's degrees": (
        lambda: compiled(plan=plan_of(dp=4)),
        "dp=4 and tp=2 do not make up the world of 4 ranks",
    ),
    "compile, one place for many ranks": (lambda: compiled(1, dp=2), "dp=2 and tp=1 do not make up the world of 4"),
    "compile, another size": (
        lambda: compiled(2, cp=4, mesh=of(2, 2, names=("cp", "tp"))),
        "dimension 'cp' of that size, and it has one of 2",
    ),
    "compile, no names": (lambda: compiled(of(2, 2, names=("x", "tp"))), "one that gives the degrees has some of"),
    "compile, no batch": (
        lambda: compiled(2, dp=2, ids=None),
        "dp=2 needs example_inputs, one rank's slice",
    ),
    "compile, twice": (lambda: compiled(of(2, 2, names=("dp", "tp")), dp=2), "the axis dp is named twice"),
    "compile, the mesh twice": (
        lambda: compiled(of(2, 2, names=("dp", "tp")), mesh=of(4, names=("tp",))),
        "the mesh is given twice",
    ),
    "compile, one name for two": (lambda: compiled(named("dp", "dp")), "the mesh names the axis 'dp' twice"),
    "compile, order": (lambda: compiled(of(2, 2, names=("tp", "dp"))), "the mesh has the axes in the order tp, dp"),
    "compile, order of mesh=": (
        lambda: compiled(2, dp=2, mesh=of(2, 2, names=("tp", "dp"))),
        "the mesh has the axes in the order tp, dp",
    ),
    "compile, sequence": (lambda: compiled(1, cp=4, ids=TOKENS[:, :4]), "a sequence of 4 is not divided over 4 ranks"),
    "compile, a product": (lambda: compiled((4, 2)), "tp=8 is larger than the world"),
    "compile, a product that leaves ranks": (lambda: compiled((2, 2), dp=2), "dp=2 and tp=4 do not make up the world"),
    "compile, a factor of one": (lambda: compiled((4, 1)), "the factors of a degree are ints of at least 2"),
    "compile, a factor that splits nothing": (lambda: compiled((3, 2)), "that 3 ranks share evenly"),
    "compile, names in another order": (
        lambda: compiled(("in", "out"), mesh=of(2, 2, names=("out", "in"))),
        "tp=('in', 'out') is not how the mesh with dimensions ('out', 'in') ends",
    ),
    "compile, names of no mesh": (lambda: compiled(("out", "in")), "names dimensions of a mesh"),
    "compile, a product of a plan": (
        lambda: compiled((2, 2), plan=plan_of(dp=4)),
        "a product as tp. Give them to autotp.plan",
    ),
    "plan, order": (lambda: planned(of(2, 2, names=("tp", "cp"))), "the mesh has the axes in the order tp, cp"),
    "plan, twice": (lambda: planned(of(2, 2, names=("cp", "tp")), cp=2), "the axis cp is named twice"),
    "verify, order": (lambda: verified(of(2, 2, names=("tp", "dp"))), "the mesh has the axes in the order tp, dp"),
    "verify, twice": (lambda: verified(of(2, 2, names=("dp", "tp")), dp=2), "the axis dp is named twice"),
    "verify, no names": (lambda: verified(of(2, 2, names=("x", "tp"))), "one that gives the degrees has some of"),
    "stages, degrees": (lambda: staged(2, 2, dp=2), "pp=2 x dp=2 x tp=2 makes 8 ranks; the world has 4"),
    "stages, order": (
        lambda: staged(2, 2, mesh=of(2, 2, names=("tp", "pp"))),
        "the mesh has the axes in the order tp, pp, and it is pp, tp",
    ),
    "stages, order of dp": (
        lambda: staged(2, 1, dp=2, mesh=of(2, 2, 1, names=("dp", "pp", "tp"))),
        "the mesh has the axes in the order dp, pp, tp, and it is pp, dp, tp",
    ),
    "stages, one name for two": (lambda: staged(2, 2, mesh=named("pp", "pp")), "the mesh names the axis 'pp' twice"),
    "stages, another size": (lambda: staged(2, 2, mesh=of(4, 1, names=("pp", "tp"))), "pp=2 x tp=2 are asked for"),
}
ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "plan, sequence": (lambda: planned(2, cp=3), "a sequence of 8 is not divided over 3 ranks"),
    "plan, degree": (lambda: planned(2, dp=0), "dp=0: the data-parallel degree counts ranks"),
    "plan, devices": (lambda: planned(devices=4, global_batch=3), "global_batch=3 is not made up of"),
    "plan, a factor": (lambda: planned((5, 2)), "has a dimension that 5 ranks share evenly"),
    "plan, names": (lambda: planned(("out", "in")), "names dimensions of a mesh: give compile() that mesh"),
    "verify, a factor": (lambda: verified((0, 2)), "the factors of a degree are ints of at least 2"),
    "sweep, a degree twice": (
        lambda: autotp.sweep(Model(), [4, (2, 2)], example_inputs=TOKENS), "gives one number of ranks twice"
    ),
    "verify, batch": (lambda: verified(2, dp=3), "a batch of 2 is not divided into slices of one size by dp=3 ranks"),
    "verify, sequence": (lambda: verified(2, cp=3), "a sequence of 8 is not divided over 3 ranks"),
    "verify, a plan's batch": (
        lambda: verified(2, plan=plan_of(dp=2), ids=TOKENS[:1]), "a batch of 1 is not divided"
    ),
    "verify, another plan": (lambda: verified(2, plan=plan_of(dp=2), cp=2), "the plan is for dp=2, and cp=2 is"),
    "certify, a plan's sequence": (
        lambda: autotp.certify(Model(), plan_of(cp=2), TOKENS[:, :6]), "a sequence of 6 is not divided over 2 ranks"
    ),
}  # fmt: skip


def said(call: Callable[[], Any]) -> str:
    """The error of a call that captures nothing."""
    with patch("autotp.driver.compile.capture", side_effect=AssertionError("it is captured")):
        return message_of(call)


def said_on_ranks(rank: int, world: int, group: Any) -> dict[str, str]:
    plan_of(dp=4)
    return {name: said(call) for name, (call, _) in ON_RANKS.items()}


def test_on_ranks(pool):
    for found in pool.run(said_on_ranks, world=WORLD):
        assert not {name: found[name] for name, (_, what) in ON_RANKS.items() if what not in found[name]}


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name):
    call, what = ALONE[name]
    plan_of(dp=2)
    plan_of(cp=2)
    assert what in said(call)
