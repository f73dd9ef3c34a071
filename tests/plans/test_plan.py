"""Plans: as JSON and back, their totals, their collectives, and sequence parallelism at real sizes."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers

from autotp.api import plan as make_plan
from autotp.comm import conversions
from autotp.cost import Cluster
from autotp.cost.memory import Memory
from autotp.driver.options import Options, Steering
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs
from autotp.ir.layouts import Partition, Shard
from autotp.ir.marks import mark, write
from autotp.ir.program import Decision
from autotp.plans.describe.describe import describe
from autotp.plans.estimates import Axes, Degree, Layer, Sublayer, Timed, Totals
from autotp.plans.plan import Block, Collective, Parameter, Plan
from autotp.plans.saved import FORMAT, SAVED, file_name, fold, sealed, unfold
from tests.helpers.models import BATCH, HIDDEN, LENGTH, inputs_of, transformer
from tests.helpers.plans import communicating, planned_for, stages

# JSON


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_json_gives_the_same_plan(name, tmp_path):
    plan = planned_for(name, 2)
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    decisions = unfold(json.loads(plan.to_json())["decisions"])
    assert [d[0] for d in decisions] == list(plan.decisions)
    assert any("s" in json.dumps(how) for _, *how in decisions)


def damage(plan: Plan, **changed: Any) -> str:
    """As one would write it who knows how plans are sealed."""
    return sealed(json.loads(plan.to_json()) | changed)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda plan: "not JSON",
        lambda plan: "[]",
        lambda plan: damage(plan, layer="none"),
        lambda plan: damage(plan, axes=[["dp", {"size": 2, "breadth": 2}], ["tp", {"size": 2}]]),
        lambda plan: damage(plan, axes=[["tp", {"size": 2}], ["dp", {"size": 2}]]),
        lambda plan: sealed({k: v for k, v in json.loads(plan.to_json()).items() if k != "machines"}),
        lambda plan: sealed(json.loads(plan.to_json().replace('"totals"', '"sums"'))),
        lambda plan: sealed(json.loads(plan.to_json().replace('"count"', '"number"'))),
        lambda plan: damage(plan, parameters=fold([{"name": "x"}])),
        lambda plan: damage(plan, decisions=fold([["x", ["Q"], ["I"], None, None]])),
        lambda plan: damage(plan, decisions=fold([["x", [], [], 0, size("__import__('os').getcwd()")]])),
        lambda plan: damage(plan, decisions=fold([["x", [], [], 0, size("s0 s1")]])),
    ],
)
def test_a_damaged_plan_is_refused(damaged):
    with pytest.raises(PlanError, match=r"[Pp]lan again|Plan\.save"):
        Plan.from_json(damaged(planned_for("llama", 2)))


@pytest.mark.parametrize("number", [1, 2, 99, "3", "three"])
def test_a_plan_in_another_format_is_refused_by_its_number(number, tmp_path):
    path, text = tmp_path / "old.json", damage(planned_for("llama", 2), format=number)
    path.write_text(text)
    for read in (lambda: Plan.from_json(text), lambda: Plan.load(path)):
        with pytest.raises(PlanError, match=rf"in format {number!r}, .* reads format {FORMAT}\. Plan again with"):
            read()
    with pytest.raises(PlanError, match="old.json is a plan in format"):
        Plan.load(path)


def test_files_from_before_formats_had_a_number_are_refused_by_their_schema():
    data = json.loads(planned_for("llama", 2).to_json())
    del data["format"]
    with pytest.raises(PlanError, match=rf"in format 2, .* reads format {FORMAT}"):
        Plan.from_json(json.dumps({**data, "schema": 2}))
    with pytest.raises(PlanError, match="no format number"):
        Plan.from_json(json.dumps(data))


def test_what_a_format_holds(golden):
    """A change here is another format: raise `FORMAT` with it."""
    records = (Parameter, Collective, Block, Decision, Totals, Memory, Degree, Layer, Timed, Sublayer, Axes)
    lines = [f"format {FORMAT}", f"Plan: {' '.join(SAVED)} axes"]
    for record in records:
        lines.append(f"{record.__name__}: {' '.join(file_name(record, f.name) for f in fields(record))}")
    golden("plan-format", "\n".join(lines) + "\n")


def size(text: str) -> dict[str, Any]:
    return {"repeat": text, "segments": [[8, 1]]}


def test_symbolic_sizes_are_read_back():
    plan = planned_for("llama", 2)
    read = Plan.from_json(damage(plan, decisions=fold([["x", [], [], 0, size("2*s0*(s1 + 3) - 1")]])))
    loop = read.decisions["x"].loop
    assert isinstance(loop, Partition) and str(loop.repeat) == "2*s0*(s1 + 3) - 1"
    assert all(s.is_positive and s.is_integer for s in loop.repeat.free_symbols)  # type: ignore[union-attr]


# totals


@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 2), ("gpt2", 4), ("bert", 4), ("llama-uneven", 2), ("llama-tied", 4)]
)
def test_totals_are_sums(name, tp):
    plan, model = planned_for(name, tp), transformer(name)
    assert plan.totals.parameters == sum(p.numel() for p in model.parameters())
    assert plan.totals.local_parameters == sum(math.prod(p.local) for p in plan.parameters)
    assert plan.totals.forward_bytes == sum(c.forward_bytes for c in plan.collectives)
    assert plan.totals.backward_bytes == sum(c.backward_bytes for c in plan.collectives)
    for p in plan.parameters:
        shares = [p.layout.partition.local(r, tp) for r in range(tp)] if isinstance(p.layout, Shard) else [0]
        expected = list(p.shape)
        if isinstance(p.layout, Shard):
            expected[p.layout.dim] = max(shares)
            assert sum(shares) == p.shape[p.layout.dim]
        assert p.local == tuple(expected)
    assert plan.totals.parameter_bytes == pytest.approx(4 * plan.totals.local_parameters)
    assert plan.totals.bound <= plan.totals.seconds * (1 + 1e-6)


def test_every_collective_of_the_program_is_in_the_plan():
    model = transformer("llama")
    planned, sharded, builder = stages(model, Inputs(**inputs_of(model)), 2)
    plan = describe(planned, sharded, builder, "Llama", "training", (), [])
    assert len(plan.collectives) == communicating(sharded, planned) > 4
    gone = next(n for n in sharded.graph.nodes if mark(n).conversion is not None and n.target is conversions.f_star)
    write(gone, conversion=None)
    fewer = describe(planned, sharded, builder, "Llama", "training", (), [])
    assert len(fewer.collectives) == len(plan.collectives) - 1
    assert fewer.totals.forward_bytes < plan.totals.forward_bytes


def test_bytes_of_an_all_reduce():
    plan = planned_for("llama", 4)
    reduced = [c for c in plan.collectives if c.name == "f_star" and c.source.endswith("_proj")]
    assert reduced and {c.forward for c in reduced} == {"all_reduce"}
    for c in reduced:
        assert c.bytes == BATCH * LENGTH * HIDDEN * 4
        assert c.forward_bytes == 2 * (4 - 1) / 4 * c.bytes and c.backward is None and c.backward_bytes == 0


# sequence parallelism at real sizes


def llama_8b(batch: int, length: int) -> Plan:
    config = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return make_plan(model, 8, example_inputs={"input_ids": ids}, cluster="h100", check_capture=False)


def per_block(plan: Plan) -> dict[str, set[tuple[str, ...]]]:
    """Kind -> what the blocks of that kind send."""
    out: dict[str, set[tuple[str, ...]]] = {}
    for i, block in enumerate(plan.blocks):
        sent = tuple(sorted(c.name for c in plan.collectives if c.block == i))
        out.setdefault(block.kind, set()).add(sent)
    return out


def test_short_sequences_are_not_split():
    sent = per_block(llama_8b(1, 128))
    assert sent["attention"] == sent["mlp"] == {("f", "f_star")}


def test_a_plan_knows_the_machines_that_it_was_made_for():
    """By the preset's name, or, where they are no preset or a changed one, by their numbers; in a file too."""
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    a100 = Cluster.preset("a100")
    for cluster in (a100, replace(a100, name="mine", intra_bandwidth=1e9), replace(a100, matmul_tile=32)):
        plan = Plan.from_json(make_plan(model, 2, example_inputs=x, cluster=cluster).to_json())
        assert Options.of_plan(plan).cluster == cluster and bool(plan.machines) == (cluster is not a100)


def test_a_search_that_its_seconds_ended_says_so_with_its_bound():
    model = transformer("bert")
    early, whole = (make_plan(model, 2, example_inputs=inputs_of(model), seconds=s) for s in (0, math.inf))
    assert [note for note in early.notes if "ended after 0 CPU s" in note and "above the bound" in note]
    assert early.totals.bound <= whole.totals.least_seconds * (1 + 1e-9) and early.totals.bound > 0
    assert early.totals.least_seconds >= whole.totals.least_seconds * (1 - 1e-9)
    assert not [note for note in whole.notes if "ended after" in note], "the negative control"
    with pytest.raises(InputError, match=r"seconds=-1: give the CPU seconds"):
        Options.read(2, Steering(seconds=-1))
