"""Sweeps over degrees, and tp="auto"."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp import sweep as public
from autotp.cost.collective_costs import call_seconds
from autotp.driver import compile as build
from autotp.driver.sweep import DEGREES
from autotp.errors import InputError, PlanError
from autotp.plans.choices import Sweep
from autotp.plans.plan import Plan
from benchmarks.lists.caches import model_of
from tests.helpers.models import inputs_of, transformer


@cache
def swept(**options: Any) -> Sweep:
    model = transformer("llama")
    return autotp.sweep(model, [1, 2, 4], example_inputs=inputs_of(model), **options)


def wide() -> nn.Module:
    """Matmuls large enough that more ranks are faster."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(2)]
        return nn.Sequential(*layers).bfloat16()


def tokens() -> dict[str, Any]:
    """Examples for it; the capture is not what these tests are about."""
    return {"example_inputs": torch.empty(8, 1024, 4096, dtype=torch.bfloat16), "check_capture": False}


def test_rows_are_the_plans_of_each_degree():
    found, model = swept(), transformer("llama")
    assert [row.tp for row in found.rows] == [1, 2, 4] == list(found.plans)
    for row in found.rows:
        plan = autotp.plan(model, row.tp, example_inputs=inputs_of(model))
        assert plan.to_json() == found.plans[row.tp].to_json()
        assert (row.seconds, row.memory) == (plan.totals.seconds, plan.memory.peak)
        assert row.sent == plan.totals.forward_bytes + plan.totals.backward_bytes
        assert row.unit == "tokens" and row.throughput == 2 * 16 / row.seconds / row.tp


def test_communication_is_exposed_in_full():
    found = swept()
    for row, plan in zip(found.rows, found.plans.values(), strict=True):
        ways = [(way, c.bytes) for c in plan.collectives for way in (c.forward, c.backward) if way is not None]
        h100 = autotp.Cluster.preset("h100")
        assert row.exposed == pytest.approx(sum(call_seconds(way, size, row.tp, h100) for way, size in ways))
        assert (row.exposed == 0) == (row.tp == 1) and row.exposed < row.seconds


def test_the_model_is_captured_once(monkeypatch):
    captures = []
    original = public.__globals__["capture_model"]
    monkeypatch.setitem(public.__globals__, "capture_model", lambda *a: captures.append(a) or original(*a))
    autotp.sweep(nn.Linear(8, 8), [1, 2, 4], example_inputs=torch.randn(4, 8))
    assert len(captures) == 1


@pytest.mark.parametrize("objective", ["training", "prefill", "decode"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_largest_batch_fits_and_one_more_does_not(objective, tp):
    model, limit = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), 2e6
    row = autotp.sweep(model, tp, example_inputs=torch.randn(4, 16, 64), objective=objective, memory=limit).rows[0]
    most = row.largest_batch
    assert most is not None and most > 4

    def peak(batch: int) -> float:
        x = torch.randn(batch, 16, 64)
        return autotp.plan(model, tp, example_inputs=x, objective=objective, check_capture=False).memory.peak

    assert peak(most) <= limit < peak(most + 1)


def test_no_batch_fits_where_the_weights_do_not():
    row = autotp.sweep(nn.Linear(64, 64), 1, example_inputs=torch.randn(4, 64), memory="1KB").rows[0]
    assert (row.largest_batch, row.fits) == (0, False)


def test_a_leaner_plan_is_taken_where_the_fastest_does_not_fit():
    """One limit between the memory of the plan that is free to choose and that of the leanest."""
    model = wide()
    free = autotp.sweep(model, 2, **tokens()).rows[0]
    lean = autotp.sweep(model, 2, sequence_parallel=True, **tokens()).rows[0]
    low, high = sorted([free.memory, lean.memory])
    assert low < high, "the plans do not differ: choose another model"
    row = autotp.sweep(model, 2, memory=(low + high) / 2, **tokens()).rows[0]
    assert row.fits and row.memory <= (low + high) / 2


def test_throughput_per_device_falls_with_the_degree():
    found = autotp.sweep(wide(), [1, 2, 4, 8, 16, 32], **tokens())
    throughput = [row.throughput for row in found.rows]
    assert throughput == sorted(throughput, reverse=True)
    falls = [a / b for a, b in zip(throughput, throughput[1:], strict=False)]
    assert falls[3] > falls[2], "a group of 16 leaves the node of 8"


def test_as_text_and_as_data():
    found = swept()
    lines = str(found).splitlines()
    assert lines[0] == "LlamaForCausalLM (h100, training, batch of 2, 74.5 GiB a rank)"
    assert lines[1].split() == ["tp", "step", "exposed", "sent", "memory", "largest", "batch", "tokens/s/device"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4"]
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["model"], data["objective"], data["optimizer"]) == ("LlamaForCausalLM", "training", "adamw")
    assert data["rows"][1]["tp"] == 2 and data["rows"][1]["seconds"] == found.rows[1].seconds


# tp="auto"


def test_auto_takes_the_most_throughput_per_device_of_what_fits():
    model = wide()
    options = tokens()
    found = autotp.sweep(model, **options)
    assert [row.tp for row in found.rows] == list(DEGREES)
    plan = autotp.plan(model, "auto", **options)
    assert plan.degrees == found.rows[:1], "one rank has room for the fastest, so more of them are not asked"
    assert plan.tp == 1 and "tp='auto' took tp=1" in plan.notes[-1] and "\nDegrees\n" in str(plan)
    tight = (found.rows[1].memory + found.rows[2].memory) / 2  # room for tp=4, not for tp=2
    tighter = autotp.plan(model, "auto", memory=tight, **options)
    assert tighter.tp == 4 and [(row.tp, row.fits) for row in tighter.degrees][-2:] == [(2, False), (4, True)]
    assert Plan.from_json(tighter.to_json()) == tighter


@pytest.mark.parametrize("objective", ["training", "prefill"])
@pytest.mark.parametrize("fastest", [True, False], ids=["room for the fastest", "room for a leaner one"])
@pytest.mark.parametrize("degree", [1, 3, 5])
def test_auto_takes_what_a_sweep_over_all_degrees_takes(objective, fastest, degree):
    """With room for the fastest plan of a degree, and for what its leanest holds alone."""
    model, asked = wide(), {**tokens(), "objective": objective}
    row = autotp.sweep(model, memory=1e12, **asked).rows[degree]
    asked["memory"] = row.memory if fastest else row.memory * 0.97
    best = autotp.sweep(model, **asked).best
    if best is None:
        with pytest.raises(PlanError, match="no degree up to 32 fits"):
            autotp.plan(model, "auto", **asked)
        return
    plan = autotp.plan(model, "auto", **asked)
    assert (plan.tp, plan.totals.seconds) == (best.tp, best.seconds)
    assert len(plan.degrees) < len(DEGREES)


def test_auto_on_unlike_devices_plans_every_degree(monkeypatch):
    """A slower rank that joins a faster one makes no step shorter, so nothing is left out there."""
    monkeypatch.setattr("autotp.api.DEGREES", (1, 2))
    unlike = autotp.Cluster(ranks=["h100", "a100"])
    plan = autotp.plan(wide(), "auto", cluster=unlike, **tokens())
    assert [row.tp for row in plan.degrees] == [1, 2]


def test_auto_captures_once(monkeypatch):
    calls, original = [], build.capture_model
    monkeypatch.setattr(build, "capture_model", lambda *a: calls.append(a) or original(*a))
    autotp.compile(nn.Linear(8, 8), "auto", example_inputs=torch.randn(4, 8))
    assert len(calls) == 1


def test_auto_says_what_does_not_fit():
    with pytest.raises(PlanError, match=r"no degree up to 32 fits into 1\.0 KiB a rank: the least is"):
        autotp.plan(nn.Linear(64, 64), "auto", example_inputs=torch.randn(4, 64), memory=1024)


def test_auto_stays_in_the_node():
    asked: dict[str, Any] = {"example_inputs": torch.randn(4, 64), "memory": 1024}
    for inside, last in ((True, 8), (False, 32)):
        with pytest.raises(PlanError, match=f"no degree up to {last} fits"):
            autotp.plan(nn.Linear(64, 64), "auto", within_node=inside, **asked)


def test_auto_refuses_what_says_the_degree_already():
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    with pytest.raises(InputError, match="tp='auto' picks the degree, and mesh= and plan= come with one"):
        autotp.compile(model, "auto", example_inputs=x, plan=autotp.plan(model, 2, example_inputs=x))
    with pytest.raises(InputError, match="tp='auto' plans before the first call: give example_inputs"):
        autotp.compile(model, "auto")
    with pytest.raises(InputError, match="tp='most' is str: the tensor-parallel degree is an int"):
        autotp.plan(model, "most", example_inputs=x)  # type: ignore[arg-type]


def test_a_sweep_refuses_what_is_no_degree():
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    with pytest.raises(InputError, match="tps is empty"):
        autotp.sweep(model, [], example_inputs=x)
    with pytest.raises(InputError, match="tp=0"):
        autotp.sweep(model, [2, 0], example_inputs=x)


def compiled_on_a_rank(rank: int, world: int, group: Any, memory: float | None) -> tuple[int, list[int], float]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(4, 16, 64)
    sharded = autotp.compile(model, "auto", example_inputs=x, memory=memory)
    return (
        sharded.plan.tp,
        [row.tp for row in sharded.plan.degrees],
        float((sharded(x) - model(x)).abs().max().detach()),
    )


def test_auto_on_ranks_takes_a_divisor_of_the_world(pool):
    free, tight = pool.run(compiled_on_a_rank, None), pool.run(compiled_on_a_rank, 300e3)
    assert {(tp, tuple(tried)) for tp, tried, _ in free} == {(1, (1,))}
    assert {tp for tp, *_ in tight} == {4} and all(tried[-1] == 4 for _, tried, _ in tight)
    assert max(error for *_, error in (*free, *tight)) < 1e-5


def test_a_sweep_in_float8_stands_beside_the_models_own():
    asked: dict[str, Any] = {**tokens(), "sequence_parallel": True}
    found = autotp.sweep(wide(), [2], precision="float8", **asked)
    assert found.baseline is not None and found.baseline.baseline is None
    (row,), (own,) = found.rows, found.baseline.rows
    assert 0.5 < row.seconds / own.seconds < 0.95  # products at twice the rate, and casts beside them
    assert row.sent < own.sent  # what is gathered forward, in a byte an element
    assert "float8 tensorwise" in str(found) and " own " in str(found)
    assert found.to_dict()["own"][0]["seconds"] == own.seconds
    assert any("3 of 4 linear layers are in float8" in note for note in found.plans[2].notes)
    with pytest.raises(InputError, match="float8-rowwise"):
        autotp.sweep(wide(), [1], precision="fp8", **tokens())


@pytest.mark.parametrize(("family", "degrees"), [("qwen2.5-0.5b", (1, 2, 3, 8)), ("llama-1b", (6, 8, 16))])
def test_more_ranks_hold_no_fewer_sequences(family, degrees):
    """Decoding beside 4,096 tokens, with 2 and 8 heads of keys: fewer than the ranks, or not dealt evenly."""
    inputs = {"input_ids": torch.zeros(32, 4096, dtype=torch.long)}
    rows = autotp.sweep(model_of(family), degrees, example_inputs=inputs, objective="decode", check_capture=False).rows
    batches = [row.largest_batch or 0 for row in rows]
    assert batches == sorted(batches) and min(batches) > 0
