"""Costs as vectors of named terms: they add and scale, and under an objective's weights they are a plan's step."""

from functools import cache

import pytest

from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.cost.terms import TERMS, Cost
from autotp.driver.compile import solve_plan
from autotp.driver.options import Options, Steering
from autotp.plans.estimates import Axes
from autotp.plans.plan import Plan
from tests.helpers.models import captured


@cache
def plan_for(objective: str) -> Plan:
    program, notes = captured("llama")
    return solve_plan(program, notes, Options.read(2, Steering(objective=objective)), "llama")


def test_costs_add_and_scale():
    one, two = Cost(compute=1.0, launches=2.0), Cost(compute=4.0, activation_bytes=8.0)
    assert one + two == Cost(compute=5.0, launches=2.0, activation_bytes=8.0) == Cost.total([one, two])
    assert 3 * one == one * 3 == Cost(compute=3.0, launches=6.0) and one["communication"] == 0.0
    assert two.weighted({"compute": 2.0, "waiting": 9.0}) == 8.0
    assert hash(one) == hash(Cost(launches=2.0, compute=1.0)) and repr(one) == "Cost(compute=1, launches=2)"


@pytest.mark.parametrize("objective", ["training", "prefill", "decode"])
def test_a_plans_terms_are_its_step_and_are_printed(objective):
    totals, weights = plan_for(objective).totals, Objective(objective).weights
    step = Cost(**totals.terms).weighted(weights)
    assert step == pytest.approx(totals.seconds, rel=1e-9)
    assert totals.terms["parameter_bytes"] == pytest.approx(totals.parameter_bytes)
    assert totals.terms["communication"] == pytest.approx(totals.communication)
    report = plan_for(objective).report()
    for name in {"compute", "launches", "communication"}:
        less = Cost(**{k: x for k, x in totals.terms.items() if k != name})
        assert less.weighted(weights) < (1 - 1e-5) * totals.seconds and f"{name} " in report  # each is a part of it


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw-plain"])
def test_the_optimizers_traffic_by_hand(optimizer):
    """float32: the gradient is read, the weight and each of its states are read and written."""
    program, notes = captured("einsum")
    options = [Options.read(2, Steering(optimizer=optimizer), Axes(n, fully_shard=n > 1)) for n in (1, 2)]
    plan, dealt = (solve_plan(program, notes, x, "einsum") for x in options)
    states = 0 if optimizer == "sgd" else 2
    seconds = plan.totals.parameter_bytes * (1 + 2 * (1 + states)) / Cluster.preset("h100").memory_bandwidth
    assert plan.totals.terms["optimizer"] == pytest.approx(seconds) and "optimizer " in plan.report()
    assert plan.totals.seconds - plan.totals.passes == pytest.approx(seconds)
    assert dealt.totals.terms["optimizer"] == pytest.approx(seconds / 2)  # each dp rank has a part of the states
    assert plan_for("prefill").totals.terms.get("optimizer", 0.0) == 0.0  # and weighs nothing if it had one
    assert Objective("prefill").seconds(Cost(optimizer=1.0)) == 0.0 < Objective().seconds(Cost(optimizer=1.0))


def test_every_term_of_a_plan_is_in_the_table():
    names = {name for objective in ("training", "decode") for name in plan_for(objective).totals.terms}
    assert names <= TERMS.keys() and Objective("decode").weights.keys() <= TERMS.keys()
