"""Shares that are found for unlike ranks: proved, dealt by speed and by memory, priced and saved; or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import autotp
from autotp.cost.units import Works
from autotp.driver import shares
from autotp.errors import InputError, PlanError
from tests.helpers.models import inputs_of, transformer

WIDE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6, "num_hidden_layers": 2}
LOCAL = replace(autotp.Cluster.preset("local"), intra_latency=1e-7, intra_bandwidth=1e12, collective_overhead=1e-7)
LOCAL = replace(LOCAL, launch_overhead=1e-9, memory_bandwidth=1e11)


def machine(speed: float = 1.0, **changed: Any) -> autotp.Cluster:
    """The local machine, so many times as fast."""
    rates = {name: speed * rate for name, rate in LOCAL.peak_flops.items()}
    more: dict[str, Any] = {"memory_bandwidth": speed * LOCAL.memory_bandwidth, "name": f"{speed:g}", **changed}
    return replace(LOCAL, peak_flops=rates, **more)


def cluster(*speeds: float) -> autotp.Cluster:
    return autotp.Cluster(ranks=[machine(speed) for speed in speeds])


def independent(staged: Any) -> float:
    """Seconds of a step by what each rank does as it is dealt, operator by operator between collectives; slices are
    taken in the seconds of the slowest."""
    prices, planned, total = staged.builder.prices, staged.planned, 0.0
    own = [[w for *_, w in Works(planned, prices.on(rank)).walk(staged.sharded)] for rank in range(planned.tp)]
    works = [w for *_, w in Works(planned, prices).walk(staged.sharded)]
    for way in (0, 1) if prices.objective.training else (0,):
        here = np.zeros(planned.tp)
        for k, work in enumerate(works):
            if work.directions[way].call is None:
                here += [(work if work.change else each[k]).directions[way][0] for each in own]
                continue
            total, here = total + here.max() + work.directions[way][0], np.zeros(planned.tp)
        total += here.max()
    updates = np.zeros(planned.tp)
    for node, leaf in prices.leaves.items() if prices.objective.training else ():
        how = planned.decisions[node].outs[0], leaf.kind.weight
        updates += [prices.on(rank).weight(node.meta["val"], *how)["optimizer"] for rank in range(planned.tp)]
    return total + updates.max()


@pytest.mark.parametrize("objective", ["training", "prefill"])
def test_found_proved_and_priced(objective: str, monkeypatch: pytest.MonkeyPatch):
    """Thrice as fast is dealt thrice as much, family by family; every value is the original's; the seconds are those
    that each rank takes by itself, and no shares take less."""
    model, trials = transformer("llama", hidden_size=128, num_attention_heads=16, num_key_value_heads=8), []
    made = shares.Trial.record
    monkeypatch.setattr(shares.Trial, "record", lambda own, even: trials.append(own) or made(own, even))
    keywords: Any = {"cluster": cluster(3, 1), "objective": objective}
    plan = autotp.plan(model, 2, example_inputs=inputs_of(model, length=64), **keywords)
    assert plan.share_choice is not None and plan.share_choice.seconds == pytest.approx(
        independent(trials[0].staged), rel=1e-3
    )
    assert (
        plan.share_choice.bound == pytest.approx(plan.share_choice.seconds)
        and plan.share_choice.seconds < 0.8 * plan.share_choice.even
    )
    dealt = {each.length: each.units for each in plan.share_choice.dealt}
    assert dealt[8] == (6, 2) and abs(dealt[128][0] - 96) <= 4
    assert autotp.verify(model, 2, inputs_of(model, length=13), plan=plan)
    assert autotp.Plan.from_json(plan.to_json()) == plan
    text = " ".join(str(plan).split())
    assert "8 as 6:2 (q_proj" in text and "FITS on every rank" in text and "evenly" in text


def test_equal_ranks_have_the_plans_that_they_had():
    """Byte for byte: of a cluster that says rank by rank the same, and where shares are asked for by name."""
    model, x = transformer("llama", **WIDE), inputs_of(transformer("llama", **WIDE))
    plain = autotp.plan(model, 2, example_inputs=x, cluster=machine()).to_json()
    assert autotp.plan(model, 2, example_inputs=x, cluster=machine(), shares="auto").to_json() == plain
    assert autotp.plan(model, 2, example_inputs=x, cluster=cluster(1, 1)).to_json() == plain
    assert "share_choice" not in plain


def test_what_fits_only_unevenly():
    """By each rank's memory: dealt to the larger, and refused where shares by hand are even, or nothing fits."""
    model, x = transformer("llama", **WIDE), inputs_of(transformer("llama", **WIDE))
    steering: Any = {"example_inputs": x, "objective": "prefill"}
    even = autotp.plan(model, 2, cluster=cluster(1.01, 1), **steering)
    assert even.share_choice is not None
    most = max(even.share_choice.memory)

    def ranks(*parts: float) -> autotp.Cluster:
        return autotp.Cluster(ranks=[machine(memory_size=part * most, name=str(part)) for part in parts])

    plan = autotp.plan(model, 2, cluster=ranks(2.0, 0.8), **steering)
    assert plan.share_choice is not None and not plan.share_choice.even_fits and not plan.share_choice.full
    assert plan.share_choice.memory[1] <= 0.8 * most < plan.share_choice.memory[0]
    assert "which does not fit" in " ".join(str(plan).split()) and autotp.verify(model, 2, x, plan=plan)
    with pytest.raises(PlanError, match=r"shares=\(1, 1\) do not fit into the ranks of .*: rank 1 holds"):
        autotp.plan(model, 2, cluster=ranks(2.0, 0.8), shares=(1, 1), **steering)
    with pytest.raises(PlanError, match="no shares fit"):
        autotp.plan(model, 2, cluster=ranks(0.5, 0.4), **steering)


def test_the_even_split_is_kept_where_padding_eats_the_gain():
    """Sequences gathered over a slow link as long as the longest part: what a rank would save is less."""
    model, slow = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)), {"intra_bandwidth": 1e5}
    ranks = autotp.Cluster(ranks=[machine(speed, **slow) for speed in (1.1, 1)])
    plan = autotp.plan(model, 2, example_inputs=torch.randn(64, 64), cluster=ranks, objective="prefill")
    assert plan.share_choice is not None and plan.share_choice.seconds == plan.share_choice.even
    assert "so the even split is kept" in " ".join(str(plan).split())


def test_a_slower_device_before_a_faster_one_is_told_of():
    """What torch's Shard cannot say: the even split is kept, and the plan says in which order they would gain; the
    other way round, or of shares that are given, there is nothing to say."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)), torch.randn(512, 64)
    told = []
    for speeds, given in ((1, 2), None), ((2, 1), None), ((1, 2), (1, 1)):
        plan = autotp.plan(model, 2, example_inputs=x, cluster=cluster(*speeds), shares=given, check_capture=False)
        assert plan.share_choice is not None and bool(plan.shares) == (speeds == (2, 1))
        told.append([note for note in plan.notes if "1:2 in the same time" in note and "the fastest first" in note])
    assert [*map(len, told)] == [1, 0, 0]


def test_machines_the_other_way_round_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: with each rank priced on the other's machine the fast one is not dealt more."""
    model, ranks = transformer("llama", **WIDE), cluster(2, 1)
    monkeypatch.setattr(autotp.Cluster, "rank", lambda own, rank: own.ranks[1 - rank] if own.ranks else own)
    plan = autotp.plan(model, 2, example_inputs=inputs_of(model, length=64), cluster=ranks)
    assert plan.share_choice is not None and plan.share_choice.seconds == plan.share_choice.even


def test_refused_beside_a_product():
    x: Any = {"example_inputs": torch.randn(8, 64)}
    with pytest.raises(InputError, match="unlike ranks hold no copies"):
        autotp.plan(torch.nn.Linear(64, 64), (2, 2), shares="auto", **x)
