"""What `print` shows of a plan: one screen first, at most 50 lines, 80 columns, no name broken; `report` has all."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
import transformers
from rich.console import Console

import autotp
from autotp.cost.memory import Memory
from autotp.driver.compile import solve_plan
from autotp.driver.options import Options, Steering
from autotp.plans.estimates import Axes, Degree
from autotp.plans.plan import Plan
from autotp.plans.show.document import report
from autotp.plans.show.overview import BAR, LABEL, MAX_LINES
from autotp.plans.show.terminal import Sheet, plain
from autotp.text import seconds
from tests.helpers.models import captured
from tests.helpers.plans import planned_for

GIB = 2.0**30
LONG = "model.language_model.layers.0.self_attn.kv_a_proj_with_mqa_and_more.weight"


@pytest.fixture(scope="module")
def llama8b() -> Plan:
    """Llama-3-8B, 32 layers, on the meta device: the capture is the readme's."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.zeros(8, 4096, dtype=torch.long, device="meta")
    inputs = autotp.Inputs(input_ids=tokens, labels=tokens)
    return autotp.plan(model, 8, example_inputs=inputs, check_capture=False)


def shown(content, width: int) -> list[str]:
    """Lines as rich prints them on a console of this width."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(content, crop=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def named(plan: Plan, name: str, change) -> Plan:
    """The plan with one parameter called differently, in its block too."""
    rename = {name: change}
    return replace(
        plan,
        parameters=tuple(replace(p, name=rename.get(p.name, p.name)) for p in plan.parameters),
        blocks=tuple(replace(b, parameters=tuple(rename.get(n, n) for n in b.parameters)) for b in plan.blocks),
    )


def filling(plan: Plan, gib: float, moving: float = 0.0) -> Plan:
    """The plan with this memory at the peak, a part of it activations."""
    return replace(plan, memory=Memory(parameters=(gib - moving) * GIB, activations=moving * GIB))


def test_a_large_llama_takes_one_screen_and_a_short_table(llama8b):
    assert len(str(llama8b).splitlines()) <= MAX_LINES == 50
    for width in (80, 120):
        assert shown(llama8b, width) == str(llama8b).splitlines()
    assert max(map(len, str(llama8b).splitlines())) <= 80
    assert len(llama8b.report().splitlines()) > len(str(llama8b).splitlines())


def test_the_first_lines_say_what_on_what_whether_it_fits_and_how_fast(llama8b):
    lines = str(llama8b).splitlines()
    assert lines[0] == "LlamaForCausalLM  tp=8 on h100  training, 8 x 4096 tokens"
    assert re.match(r"FITS: 7\d\.\d GiB of 74\.5 GiB a device, at the forward of lm_head", lines[1])
    t = llama8b.totals
    rate = f"{8 * 4096 / t.seconds / 1e3:.2f}k"
    assert t.least_seconds < t.seconds <= 1.02 * t.least_seconds  # what it sends less is worth that much
    near = f"within 0.02 of optimal {1e3 * t.least_seconds:.3f} ms"
    assert lines[2].startswith(f"step {1e3 * t.seconds:.3f} ms ({near}); ")
    assert f"{rate} tokens/s" in " ".join(" ".join(lines[2:4]).split())
    text = "\n".join(lines)
    assert 'outputs="loss" or "sharded"' in text and "(lm_head, 6.8 GiB)" in text
    assert "q_proj k_proj v_proj[cols] attention" in text and "down_proj[rows] --RS/AG-->" in text
    assert lines[-3].startswith("I whole  R whole")


def test_what_is_hidden_is_in_the_times_of_the_layers_and_not_in_the_step(llama8b):
    t, layer = llama8b.totals, llama8b.layer
    assert layer is not None and t.terms["hidden"] > 0.01 * t.seconds
    assert layer.total + layer.outside.seconds == pytest.approx(t.alone, rel=1e-9)
    assert t.alone == pytest.approx(t.passes + t.terms["hidden"] + t.terms.get("bucketed", 0.0))


def test_the_bars_are_as_long_as_what_they_show(llama8b):
    bars = {line.split()[0]: line[LABEL:] for line in str(llama8b).splitlines() if line.startswith(("memory", "time"))}
    most, m = 80e9, llama8b.memory
    assert len(bars["time"]) == BAR and len(bars["memory"]) == BAR + 1
    assert bars["memory"].count("k") == pytest.approx(BAR * m.activations / most, abs=1)
    half = str(filling(llama8b, 40e9 / GIB)).splitlines()
    assert next(line for line in half if line.startswith("memory"))[LABEL:] == "p" * 32 + " " * 32 + "|"


def test_what_does_not_fit_is_said_with_what_would():
    plan = planned_for("llama", 2)
    assert "FITS: " in str(plan) and "does NOT fit" not in str(plan)
    large = str(filling(plan, 100))
    assert "does NOT fit: 100.0 GiB of 74.5 GiB a device" in large and "FITS" not in large
    assert "about tp=3, if memory fell with tp" in large and "fully_shard over dp" in large
    assert "a smaller batch, or checkpointing" in str(filling(plan, 100, moving=80))
    tried = tuple(Degree(tp, 1.0, 0.0, 0.0, 0.0, tp > 4, 1.0, "tokens", None) for tp in (2, 4, 8, 16))
    assert "tp=8 fits" in str(replace(filling(plan, 100), degrees=tried))
    assert "is not known" in str(replace(plan, cluster="mine")) and "FITS" not in str(replace(plan, cluster="mine"))
    mine = autotp.Cluster(**{**autotp.Cluster.preset("h100").to_dict(), "name": "mine", "memory_size": 1e5})
    assert "does NOT fit" in str(replace(plan, cluster="mine", machines=mine.to_dict()))


def test_time_over_dp_that_nothing_hides_is_in_the_step():
    program, notes = captured("llama")
    slow = replace(autotp.Cluster.preset("h100"), name="slow", intra_bandwidth=1e8)

    def of(size: int, cluster: autotp.Cluster | str = slow) -> Plan:
        return solve_plan(program, notes, Options.read(2, Steering(cluster=cluster), Axes(size)), "llama")

    alone, plan = of(1), of(2)
    waits = plan.batch.seconds - plan.batch.backward
    assert waits == plan.batch.exposed > alone.totals.seconds / 2
    assert plan.totals.seconds == pytest.approx(alone.totals.seconds + waits)
    assert plan.totals.seconds - plan.totals.bound == pytest.approx(alone.totals.seconds - alone.totals.bound)
    assert re.search(rf"predicted step +{re.escape(seconds(plan.totals.seconds))} ", plan.report())
    assert Plan.from_json(plan.to_json()).totals == plan.totals
    assert f"! up to {seconds(waits)} go over dp and do not fit beside the backward" in str(plan)
    hidden = replace(plan, batch=replace(plan.batch, backward=2 * plan.batch.seconds))
    assert hidden.batch.exposed == 0.0 and "beside the backward" not in str(hidden)


def test_work_that_every_rank_does_is_said():
    plan = planned_for("llama", 2)
    same = replace(plan, totals=replace(plan.totals, local_flops=plan.totals.flops))
    assert "a rank has 100% of the flops where 1/2 would be even" in " ".join(str(same).split())


@pytest.mark.parametrize("width", [80, 110, 140])
def test_no_name_is_broken(width):
    plan = planned_for("bert", 2)
    first = next(p.name for p in plan.parameters if p.role != "whole")
    plan = named(plan, first, LONG)
    for text in ("\n".join(shown(plan, width)), plain(Sheet(report(plan)), width), str(plan), plan.report()):
        assert LONG in text
    text = plain(Sheet(report(plan)), width)
    assert all(block.module in text for i, block in enumerate(plan.blocks) if block.first == i)
    words = {word for p in plan.parameters for word in p.first.split(".")}
    assert all(word in text for word in words)
    assert LONG not in str(named(plan, LONG, LONG.replace("proj", "pro\nj")))  # a broken one is noticed


def test_a_model_of_many_parts_is_cut_to_fifty_lines():
    plan = planned_for("llama", 2)
    blocks = tuple(replace(b, first=i) for i, b in enumerate(plan.blocks * 9))
    many = replace(plan, blocks=blocks)
    lines = str(many).splitlines()
    assert len(lines) <= MAX_LINES and any(re.match(r"and \d+ smaller parts", line) for line in lines)
    assert len(many.report().splitlines()) > 3 * MAX_LINES


def test_one_rank_sends_nothing_and_plans_without_sizes_are_shown():
    alone = str(planned_for("llama", 1))
    assert "-->" not in alone and "whole on every rank" not in alone and "FITS" in alone
    plan = planned_for("llama", 2)
    old = str(replace(plan, totals=replace(plan.totals, examples=0, length=0), layer=None))
    assert (
        "tokens/s" not in old and "layer " not in old and old.startswith("LlamaForCausalLM  tp=2 on h100  training\n")
    )


class Powers(torch.nn.Module):
    """Only an operator that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(self.weight)


def test_a_plan_that_splits_no_arithmetic_says_so_at_the_top():
    plans = [
        autotp.plan(m, 2, example_inputs=torch.randn(4, 8), check_capture=False)
        for m in (Powers(), torch.nn.Linear(8, 8))
    ]
    for text in (str(plans[0]), plans[0].report()):
        assert text.splitlines()[1].startswith("NO ARITHMETIC IS SPLIT: each of the 2 ranks does all of it.")
    assert "NO ARITHMETIC" not in str(plans[1]) + plans[1].report()
