"""The times of one layer in a plan, its timeline, and the trace for Perfetto."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autotp.api import plan as make_plan
from autotp.driver.compile import solve_plan
from autotp.driver.options import Options, Steering
from autotp.errors import PlanError
from autotp.plans.describe.describe import layer
from autotp.plans.estimates import Layer, Timed
from autotp.plans.plan import Plan
from autotp.plans.saved import sealed
from autotp.plans.show.timeline import heading, timeline
from tests.helpers.models import captured, inputs_of, planned, transformer

EXACT = 1e-12  # relative: sums of the same numbers in another order


def off(plan: Plan) -> float:
    """By how much of a step the times of all layers and of what is outside miss the step of which nothing overlaps."""
    assert plan.layer is not None
    return abs(plan.layer.total + plan.layer.outside.seconds - plan.totals.alone) / plan.totals.alone


def sent(plan: Plan) -> float:
    return sum(part.communication for part in plan.sublayers)


# the plan's own data


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gptj"])
def test_layers_and_the_rest_make_the_step(name):
    plan = planned(name, 4)[0]
    assert plan.layer is not None and plan.layer.count > 1
    assert off(plan) < EXACT
    less = replace(plan.layer, outside=replace(plan.layer.outside, compute=0.0))  # and it would show
    assert off(replace(plan, layer=less)) > 0.01


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_equal_layers_take_equal_times(name):
    plan = planned(name, 4)[0]
    one = plan.layer
    assert one is not None and one.alike == one.count == 2
    assert one.total == pytest.approx(2 * one.seconds, rel=EXACT)
    both = 2 * sent(plan) + one.outside.communication
    assert both == pytest.approx(plan.totals.communication, rel=EXACT) and sent(plan) > 0


def test_a_layer_that_converts_otherwise_is_told_apart():
    options = Options.read(4, Steering(band=0.0))  # the fastest one: of those that send less both layers are equal
    one = solve_plan(*captured("gpt2"), options, "gpt2").layer
    assert one is not None and (one.count, one.alike) == (2, 1)
    assert one.total != pytest.approx(2 * one.seconds, rel=1e-3)


def test_sublayers_are_attention_and_feed_forward():
    plan = planned("llama", 4)[0]
    parts = {part.name: part for part in plan.sublayers}
    assert list(parts) == ["attention", "feed-forward", "rest"]
    for part in parts.values():
        assert part.share == pytest.approx(part.communication / (part.compute + part.communication))
    assert parts["attention"].share > 0 and parts["feed-forward"].share > 0 == parts["rest"].share
    steps = [step for step in plan.layer.steps if step.part == "attention"]  # type: ignore[union-attr]
    assert sum(step.name == "aten.linear" for step in steps) == 4
    assert [step.name for step in steps if step.converts] == ["f", "f_star"]
    alone = {part.name: part for part in planned("llama", 1)[0].sublayers}
    assert all(part.communication == part.share == 0 for part in alone.values())
    assert alone["attention"].compute > 0


def test_depth_is_only_counted():
    layers = [make_plan(transformer("llama", num_hidden_layers=n), 4, example_inputs=ids()).layer for n in (2, 4)]
    assert layers[0] is not None and layers[1] is not None
    assert layers[0].steps == layers[1].steps and [x.count for x in layers if x] == [2, 4]
    assert layers[1].total == pytest.approx(2 * layers[0].total, rel=EXACT)


def made(*blocks: tuple[str, float]) -> Layer:
    """The layer of blocks of one operator each, at these paths and of these seconds."""
    steps = [Timed("aten.linear", path, "rest", seconds) for path, seconds in blocks]
    placed = [(step, tuple(outer(step.module))) for step in steps]
    return layer(placed, {p: p.rpartition(".")[0] for _, paths in placed for p in paths if p[-1].isdigit()})


def outer(path: str) -> list[str]:
    """The indexed modules around a path, outermost first: a.0.b.1 lies in a.0 and a.0.b.1."""
    names = path.split(".")
    return [".".join(names[: i + 1]) for i, name in enumerate(names) if name.isdigit()]


def test_the_block_that_takes_most_and_repeats_is_taken():
    assert made(("a.0", 1.0), ("a.1", 1.0), ("b.0", 2.0), ("b.1", 2.0)).module == "b.0"
    common = made(("a.0", 3.0), ("a.1", 1.0), ("a.2", 1.0), ("rest", 0.5))
    assert (common.module, common.count, common.alike) == ("a.1", 3, 2)
    assert (common.total, common.outside.compute) == (5.0, 0.5)
    stages = made(("a.0.b.0", 9.0), ("a.1.b.0", 1.0), ("a.1.c.0", 2.0), ("a.1.c.1", 2.0))
    assert stages.module == "a.1.c.0"  # no two stages are equal
    assert made(("a.0", 1.0), ("a.1", 2.0)).count == 2  # unequal ones where there is nothing else


def ids() -> dict[str, Any]:
    return inputs_of(transformer("llama"))


def test_where_nothing_repeats_it_is_the_whole_model():
    plan = planned("convolutions", 4)[0]
    assert plan.layer is not None and plan.layer.module == "" and plan.layer.count == 1
    assert plan.layer.seconds == pytest.approx(plan.totals.alone, rel=EXACT) and plan.layer.outside.seconds == 0
    assert "no block repeats" in heading(plan.layer) and "blocks" not in plan.report().split("memory per rank")[1]


def test_saved_plans_keep_the_times(tmp_path):
    plan = planned("llama", 4)[0]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.layer == plan.layer and loaded.sublayers == plan.sublayers and timeline(loaded) == timeline(plan)


def test_a_plan_without_times_says_so(tmp_path):
    data = json.loads(planned("llama", 4)[0].to_json())
    old = Plan.from_json(sealed({**data, "layer": None}))
    assert old.layer is None and old.sublayers == () and "one of 2 blocks" not in str(old)
    with pytest.raises(PlanError, match="Plan again"):
        timeline(old)
    with pytest.raises(PlanError, match="Plan again"):
        old.to_trace(tmp_path / "trace.json")


# the timeline


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_timeline_has_no_holes_and_takes_the_layers_time(name):
    plan = planned(name, 4)[0]
    events = timeline(plan)
    assert plan.layer is not None and events[0].start == 0
    assert events[-1].end == pytest.approx(plan.layer.seconds, rel=EXACT)
    assert all(b.start == pytest.approx(a.end, rel=EXACT) for a, b in zip(events, events[1:], strict=False))
    busy = sum(e.seconds for e in events if e.track == "communication")
    assert busy == pytest.approx(sent(plan), rel=EXACT) and busy > 0
    assert {e.track for e in events} == {"compute", "communication"}


def test_forward_comes_first_and_backward_in_reverse():
    events = timeline(planned("llama", 4)[0])
    passes = [e.direction for e in events]
    assert passes == sorted(passes, reverse=True) and {"forward", "backward"} == set(passes)
    labels = {d: [e.label for e in events if e.direction == d] for d in passes}
    assert labels["forward"].index("linear (q_proj)") < labels["forward"].index("linear (o_proj)")
    assert labels["backward"].index("linear (q_proj)") > labels["backward"].index("linear (o_proj)")
    assert [x for x in labels["forward"] if "all-reduce" in x] == ["all-reduce (f*)"] * 2
    assert [x for x in labels["backward"] if "all-reduce" in x] == ["all-reduce (f)"] * 2
    after = labels["forward"][labels["forward"].index("linear (o_proj)") + 1]
    assert after == "all-reduce (f*)"


def test_inference_has_no_backward():
    model = transformer("gpt2")
    plan = make_plan(model, 4, example_inputs=inputs_of(model), objective="prefill")
    assert {e.direction for e in timeline(plan)} == {"forward"} and off(plan) < EXACT
    assert plan.layer is not None and all(step.backward == 0 for step in plan.layer.steps)


# the trace


def test_the_trace_is_the_timeline(tmp_path):
    plan = planned("llama", 4)[0]
    plan.to_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    spans = [row for row in rows if row["ph"] == "X"]
    assert set(named.values()) == {"pass", "compute", "communication"} and plan.layer is not None
    assert {row["ph"] for row in rows} == {"M", "X"} and all({"ts", "dur", "pid", "tid"} <= set(s) for s in spans)
    busy = {name: sum(s["dur"] for s in spans if named[s["tid"]] == name) for name in named.values()}
    assert busy["compute"] + busy["communication"] == pytest.approx(1e6 * plan.layer.seconds)
    assert busy["pass"] == pytest.approx(1e6 * plan.layer.seconds)
    assert busy["communication"] == pytest.approx(1e6 * sent(plan))
    for thread in named:  # nothing lies on top of another
        own = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == thread)
        assert all(b[0] >= a[1] - 1e-6 for a, b in zip(own, own[1:], strict=False))
    (f_star, *_) = [s for s in spans if s["name"] == "all-reduce (f*)"]
    assert f_star["args"]["layouts"] == "P -> I" and f_star["args"]["bytes"] == 2 * 16 * 64 * 4
