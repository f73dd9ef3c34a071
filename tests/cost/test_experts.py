"""Experts over the ranks of dp in plans: what they cost, what imbalance adds, and meshes that have them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Shard

import autotp
from autotp.cost import Cluster
from autotp.errors import InputError
from autotp.plans.plan import Plan
from tests.helpers.modules.mixtures import mixture, tokens


@cache
def planned(tp: int = 1, **keywords: Any) -> Plan:
    return autotp.plan(mixture("by hand", double=False), tp, example_inputs=tokens(), check_capture=False, **keywords)


def test_imbalance_makes_products_and_exchanges_longer():
    even, uneven = (planned(dp=2, ep=2, imbalance=x) for x in (1.0, 1.5))
    sent = [plan.batch.values for plan in (even, uneven)]
    assert sent[0] < sent[1] < 1.5 * sent[0], "counts are sent as before"
    assert uneven.totals.seconds > even.totals.seconds and uneven.batch.imbalance == 1.5
    assert planned(dp=2, imbalance=1.5).totals == planned(dp=2).totals, "whole experts have their own rows"
    assert Plan.from_json(uneven.to_json()).batch == uneven.batch


def test_imbalance_counts_where_experts_are_dealt_over_tp():
    """By expert a rank of tp has the rows of its experts alone."""
    model, pins = mixture("by hand", double=False), {"up": Shard(0)}
    even, uneven = (autotp.plan(model, 2, example_inputs=tokens(), pins=pins, imbalance=x) for x in (1.0, 2.0))
    assert even.totals.seconds < uneven.totals.seconds


@pytest.mark.parametrize("imbalance", [0.9, "much", True, float("inf")])
def test_an_imbalance_is_a_number_of_at_least_one(imbalance):
    with pytest.raises(InputError, match="at least 1, such as"):
        planned.__wrapped__(dp=2, imbalance=imbalance)


def test_what_a_rank_sends_is_what_travels():
    """Two exchanges each way of rows of 16 floats, two for each of 24 tokens, of which half stay on the rank."""
    plan = planned(dp=2, ep=2)
    rows, counts = 2 * 24 * 16 * 4 / 2, (4 + 1) * 8
    assert plan.batch.values == 4 * rows + counts


def test_a_mesh_may_deal_out_experts():
    model = mixture("by hand", double=False)
    choice = autotp.plan(model, 1, devices=4, example_inputs=tokens(length=8), check_capture=False)
    degrees = {(*row.mesh.degrees, row.mesh.ep) for row in choice.ranked}
    assert {(1, 4, 1, 1, 1), (1, 4, 1, 1, 4)} <= degrees
    assert all(ep == 1 for _, _, cp, _, ep in degrees if cp > 1), "autotp does not run these"
    _, row = choice.place(dp=4, ep=4)
    assert row.call.startswith("autotp.compile(model, 1, dp=4, ep=4") and " ep " in str(choice)
    assert row.sent["cp"] > 0 == choice.place(dp=4)[1].sent["cp"]


def chosen(tp: int = 1, **keywords: Any) -> Plan:
    """A plan whose experts are whole or dealt out as is faster."""
    inputs = tokens(batch=2, length=256)
    model = mixture("by hand", double=False, width=128)
    keywords = {"dp": 4, "ep": "auto", "check_capture": False, **keywords}
    return autotp.plan(model, tp, example_inputs=inputs, **keywords)


def test_the_cheaper_of_whole_experts_and_travelling_is_taken_and_said():
    link = {"inter_bandwidth": 1e6, "inter_latency": 1e-6, "devices_per_node": 1, "collective_overhead": 1e-9}
    slow = replace(Cluster.preset("h100"), **link)
    plans = {ep: chosen(ep=ep, cluster=slow) for ep in (1, 4)}
    best = min(plans.values(), key=lambda plan: plan.totals.seconds)
    auto = chosen(cluster=slow)
    assert auto.batch == best.batch and auto.totals == best.totals
    note = next(x for x in auto.notes if x.startswith("ep='auto'"))
    assert "own_rows" not in note and "longer for" in note and "experts whole on each dp rank" in note, note
    # What exchanges cost grows with the most rows that a rank gets: with so many, nothing travels.
    assert chosen(cluster=slow, imbalance=1e6).batch.ep == 1


def test_what_does_not_fit_is_not_chosen():
    plans = [chosen(ep=ep) for ep in (1, 4)]
    least, most = sorted(plan.memory.peak for plan in plans)
    assert least < most
    fitting = chosen(memory=(least + most) / 2)
    assert fitting.memory.peak == least


def test_a_choice_that_cannot_be_made_is_one_sentence():
    with pytest.raises(InputError, match=r"ep='auto' deals experts to ranks of dp, and dp is 1. Give dp"):
        chosen(dp=None)
    with pytest.raises(InputError, match="sequences do not travel"):
        chosen(cp=2)
    with pytest.raises(InputError, match="ep='auto': the expert-parallel degree counts ranks"):
        autotp.verify(mixture("by hand"), 1, tokens(), dp=2, ep="auto")
    whole = autotp.plan(nn.Embedding(32, 8), 1, example_inputs=tokens()["input_ids"], dp=2, ep="auto")
    assert whole.batch.ep == 1 and "no number of ranks" in whole.notes[-1]


def test_a_sweep_has_experts_over_dp():
    model = mixture("by hand", double=False)
    found = autotp.sweep(model, [1, 2], example_inputs=tokens(), dp=2, ep=2, check_capture=False)
    assert "dp=2 x ep=2" in str(found) and found.to_dict()["axes"] == "dp=2 x ep=2"
    assert found.plans[2].totals.seconds == planned(2, dp=2, ep=2).totals.seconds
    assert "axes" not in autotp.sweep(model, [1], example_inputs=tokens(), check_capture=False).to_dict()
    with pytest.raises(InputError, match="float8"):
        autotp.sweep(model, [1], example_inputs=tokens(), dp=2, ep=2, precision="float8")
