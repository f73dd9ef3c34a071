"""The mesh of many devices that `autotp.plan(model, devices=N)` chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import autotp
from autotp.capture.request import CaptureRequest
from autotp.cost.meshes import Mesh
from autotp.driver import mesh_search
from autotp.driver.compile import capture_model
from autotp.driver.mesh_prices import Pricer
from autotp.driver.options import Options, Steering
from autotp.driver.staging import staging
from autotp.errors import InputError
from autotp.ir.graph import Capture
from autotp.plans.choices import TIMES, MeshChoice
from autotp.plans.estimates import Axes
from tests.helpers.models import inputs_of, transformer


@pytest.fixture(scope="module")
def captured():
    model = transformer("llama")
    inputs = autotp.Inputs(**inputs_of(model))

    @cache
    def program(tp: int, axes: Axes, check: bool = True, dealt: bool = True) -> tuple[Capture, list[str]]:
        request = CaptureRequest.read(replace(axes, cp=1))
        part = inputs.own_part(0, axes.cp)[0] if axes.cp > 1 else inputs
        return capture_model(model, part, torch.device("cpu"), False, request)

    return program


def chosen(captured, **steering: Any) -> MeshChoice:
    options = Options.read(1, Steering(**steering))
    return mesh_search.choose_mesh(captured, autotp.Inputs(torch.zeros(2)), options, "Llama", 4, 16)


@pytest.fixture(scope="module")
def search(captured):
    """The plans of every tp, for choices under several limits."""
    return mesh_search._Search(captured, 2, Options.read(1), "Llama", 4, 16)


@pytest.fixture(scope="module")
def choice(search):
    return search.run([1, 2, 4])


def test_every_mesh_is_ranked_and_the_fastest_comes_first(choice):
    found = [row.mesh.degrees for row in choice.ranked]
    every = {(pp, dp, cp, tp) for pp in (1, 2) for dp in (1, 2, 4) for cp in (1, 2, 4) for tp in (1, 2, 4)}
    every = {x for x in every if x[0] * x[1] * x[2] * x[3] == 4}
    assert set(found) == every - {(2, 1, 2, 1)} and len(found) == len(set(found)), "stages go with dp and tp alone"
    steps = [row.seconds for row in choice.ranked]
    assert steps == sorted(steps) and choice.best is choice.rows[0] and len(choice.rows) == 8
    for row in choice.ranked:
        assert row.call, row
        assert row.seconds == pytest.approx(sum(row.times.values())) and set(row.times) == set(TIMES)
        assert row.throughput == pytest.approx(16 * 16 / row.seconds / 4)
        assert (row.reason == "") == (row is choice.best)
    assert choice.place(pp=2, dp=2)[1].reason.startswith("bubble")
    with pytest.raises(InputError, match="was not priced"):
        choice.place(tp=8)


@pytest.mark.parametrize("tp", [1, 2])
def test_one_copy_costs_what_its_plan_says(search, choice, tp):
    priced, plan = search.pricers[tp, 1, 1].price(Mesh(1, 1, 1, tp, batch=2)), search.staged[tp, 1, 1].plan
    assert priced.seconds == pytest.approx(plan.totals.seconds)
    assert priced.memory == pytest.approx(plan.memory.peak - plan.memory.buffers, rel=0.02)
    assert priced.sends["tp"] == plan.totals.sent
    both = autotp.plan(transformer("llama"), tp, dp=2, fully_shard=True, example_inputs=inputs_of(transformer("llama")),
                       check_capture=False, band=0.0)  # fmt: skip
    split = search.pricers[tp, 1, 1].price(Mesh(1, 2, 1, tp, batch=2, fully_shard=True))
    assert split.sends["dp"] == pytest.approx(both.batch.sent, rel=0.02)
    assert split.seconds == pytest.approx(both.totals.seconds, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2])
def test_cp_costs_what_its_plan_says(search, choice, tp):
    model = transformer("llama")
    plan = autotp.plan(model, tp, cp=2, example_inputs=inputs_of(model), check_capture=False, band=0.0)
    priced = search.pricers[tp, 2, 1].price(Mesh(1, 1, 2, tp, batch=2))
    assert priced.seconds == pytest.approx(plan.totals.seconds)
    assert priced.memory == pytest.approx(plan.memory.peak - plan.memory.buffers, rel=0.02)
    assert priced.sends["tp"] == plan.totals.sent and priced.sends["dp"] == pytest.approx(plan.batch.sent, rel=0.02)
    # The reduction of a loss is no value of a block: it is sent over cp too, twice a few bytes.
    assert priced.sends["cp"] == pytest.approx(plan.batch.values) and priced.times["cp"] > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_stages_hold_what_autotp_stages_says(search, choice, tp):
    """The division of a pipeline, and its memory but for the working set, are those of the program that is cut."""
    staged, pricer = search.staged[tp, 1, 1], search.pricers[tp, 1, 1]
    division = staging(staged.planned, staged.sharded, staged.builder, "Llama", 2, 1, None).division
    mesh = Mesh(2, 1, 1, tp, batch=2, microbatches=4)
    assert list(pricer.starts(2, 1)) == [0, division.sizes[0]]
    held = pricer.price(mesh).memory
    assert max(division.memory) < held <= max(division.memory) + max(u.working for u in pricer.terms.units)
    sums = pricer.ranks(mesh)
    spared = (1 - pricer.terms.exposed_share) * staged.plan.totals.communication
    assert sums.total.sum() + spared == pytest.approx(sum(division.seconds))


def within(search: Any, limit: float) -> Any:
    """The choice where a device holds so many bytes, by the plans that there are."""
    search.limit = limit
    for key, staged in search.staged.items():
        machines = search._machines(staged)
        search.pricers[key] = Pricer(search.pricers[key].terms, search.options.cluster, search.batch, machines)
    return search.run([])


def test_more_memory_is_never_slower_and_none_fits_nothing(search, choice):
    steps = []
    for part in (0.6, 0.75, 0.9, 1.0, 2.0):
        best = within(search, part * choice.best.memory).best
        assert best is None or best.memory <= search.limit
        steps.append(float("inf") if best is None else best.seconds)
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1] == choice.best.seconds
    none = within(search, 1e3)
    assert (none.best, none.plan, none.fitting) == (None, None, 0)
    assert "nothing fits" in str(none) and none.rows[0].reason.startswith("too much")


def test_it_can_be_read_drawn_and_run(choice, tmp_path):
    lines = str(choice).splitlines()
    assert lines[0].startswith("Llama on 4 devices (h100, 16 x 16 a step") and lines[-1].endswith("not measured")
    assert max(map(len, lines)) <= 110 and any("why" not in line and "against" in line for line in lines)
    data = json.loads(json.dumps(choice.to_dict()))
    assert len(data["rows"]) == 8 and data["rows"][0]["mesh"]["dp"] == choice.best.mesh.dp
    choice.to_svg(tmp_path / "out.svg")
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    bars = [g for g in root.iter("{http://www.w3.org/2000/svg}g") if g.get("class") == "bar"]
    assert len(bars) == 8
    best = choice.best.mesh
    assert (choice.plan.batch.dp, choice.plan.batch.cp, choice.plan.tp) == best.degrees[1:]
    calls = {row.mesh.degrees: row.call for row in choice.ranked}
    assert calls[1, 1, 1, 4] == "autotp.compile(model, 4, dp=1, ...)"
    assert calls[1, 2, 2, 1].startswith("autotp.compile(model, 1, dp=2, cp=2")


def test_a_slow_network_keeps_stages_apart_rather_than_tokens(captured):
    """Negative control of where groups lie: with one device a node nothing is cheap, and tp groups of two nodes are
    tried and lose by the network."""
    lonely = replace(autotp.Cluster.preset("h100"), devices_per_node=1)
    found = chosen(captured, cluster=lonely)
    assert {row.mesh.tp for row in found.ranked} == {1, 2} and "cp" in found.place(cp=4)[1].network
    two = next(row for row in found.ranked if row.mesh.tp == 2)
    assert found.rows[0].mesh.tp == 1 and "tp" in two.network and two.reason


def test_what_is_left_out_is_not_among_those_shown(captured, choice, monkeypatch):
    """Negative control: more are left out where fewer are shown, and none that would be among these."""

    def short(shown: int) -> MeshChoice:
        monkeypatch.setattr(mesh_search, "SHOWN", shown)
        return chosen(captured)

    few = short(1)
    assert [row.mesh for row in few.ranked[:1]] == [row.mesh for row in choice.ranked[:1]]
    assert few.considered < short(3).considered <= choice.considered
    assert [row.mesh for row in short(3).ranked[:3]] == [row.mesh for row in choice.ranked[:3]]
    with pytest.raises(InputError, match="cp goes as far as"):
        few.place(cp=4)


def test_what_does_not_go_together_is_refused():
    model: Any = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("counts|count", {"devices": 0}),
        ("global_batch= goes with", {"tp": 2, "global_batch": 8}),
        ("give tp", {}),
        ("chooses the mesh itself", {"devices": 4, "dp": 2}),
        ("searches for training", {"devices": 4, "objective": "prefill"}),
        ("does not divide", {"devices": 4, "tp": 3}),
        ("global_batch=6 is not made up of micro-batches of 4", {"devices": 4, "global_batch": 6}),
        ("no mesh of 4 devices makes a step of 4", {"devices": 4, "tp": 2, "global_batch": 4}),
    ]
    for match, options in cases:
        with pytest.raises(InputError, match=match):
            autotp.plan(model, example_inputs=x, check_capture=False, **options)
    only = autotp.plan(model, 2, devices=4, example_inputs=x, check_capture=False)
    assert {row.mesh.degrees for row in only.ranked} == {(1, 2, 1, 2)}, "nothing repeats, so there are no stages"
