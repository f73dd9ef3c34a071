"""Plans: as JSON and back, as text, their totals, the blocks that they name, and the programs of ranks as text."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Split

from autotp import conversions
from autotp.api import plan as make_plan
from autotp.cost import Cluster
from autotp.describe import describe
from autotp.errors import PlanError
from autotp.inputs import Inputs
from autotp.layouts import I, Shard
from autotp.pipeline import capture_model
from autotp.plan import Parameter, Plan
from autotp.planner import Builder, Planned, decide
from autotp.report import render, render_graph
from autotp.rewrite import Sharded, rewrite
from autotp.slices import to_runtime
from tests.models import BATCH, HIDDEN, LENGTH, Attention, Einsum, SelfAttention, inputs_of, transformer

pinned_versions = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not transformers.__version__.startswith("5.23."),
    reason="the golden texts show the operators that the pinned versions capture",
)


@cache
def planned_for(name: str, tp: int, **changed: Any) -> Plan:
    model = transformer(name, **changed)
    return make_plan(model, tp, example_inputs=inputs_of(model))


def stages(model: nn.Module, inputs: Inputs, tp: int) -> tuple[Planned, Sharded, Builder]:
    builder = Builder(capture_model(model, inputs, torch.device("cpu"))[0], tp, Cluster.resolve(None))
    planned = decide(builder)
    return planned, rewrite(planned, builder.prices.convert), builder


def parameter(plan: Plan, ending: str) -> Parameter:
    return next(p for p in plan.parameters if p.name.endswith(ending))


def blocks(plan: Plan) -> set[tuple[str, str]]:
    return {(b.kind, b.detail) for b in plan.blocks}


def of_tokens(model: nn.Module, tp: int = 2, **options: Any) -> Plan:
    return make_plan(model.eval(), tp, example_inputs=(torch.randn(BATCH, LENGTH, HIDDEN),), **options)


# JSON


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_json_gives_the_same_plan(name, tmp_path):
    plan = planned_for(name, 2)
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert any("s" in json.dumps(d) for d in json.loads(plan.to_json())["decisions"].values())


def damage(plan: Plan, **changed: Any) -> str:
    return json.dumps(json.loads(plan.to_json()) | changed)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda plan: "not JSON",
        lambda plan: "[]",
        lambda plan: damage(plan, schema=99),
        lambda plan: plan.to_json().replace('"totals"', '"sums"'),
        lambda plan: plan.to_json().replace('"count"', '"number"') if '"count"' in plan.to_json() else "{}",
        lambda plan: damage(plan, parameters=[{"name": "x"}]),
        lambda plan: damage(plan, decisions={"x": [["Q"], ["I"], None, None]}),
        lambda plan: damage(plan, decisions={"x": [[], [], 0, size("__import__('os').getcwd()")]}),
        lambda plan: damage(plan, decisions={"x": [[], [], 0, size("s0 s1")]}),
    ],
)
def test_a_damaged_plan_is_refused(damaged):
    with pytest.raises(PlanError, match=r"[Pp]lan again|Plan\.save"):
        Plan.from_json(damaged(planned_for("llama", 2)))


def size(text: str) -> dict[str, Any]:
    return {"repeat": text, "segments": [[8, 1]]}


def test_symbolic_sizes_are_read_back():
    plan = planned_for("llama", 2)
    read = Plan.from_json(damage(plan, decisions={"x": [[], [], 0, size("2*s0*(s1 + 3) - 1")]}))
    loop = read.decisions["x"].loop
    assert loop is not None and str(loop.repeat) == "2*s0*(s1 + 3) - 1"
    assert all(s.is_positive and s.is_integer for s in loop.repeat.free_symbols)  # type: ignore[union-attr]


# text


@pytest.mark.parametrize(
    ("tp", "heads", "local"),
    [
        (2, "8 heads, 4 kv heads, 8 wide", "4 heads, 2 kv heads"),
        (4, "8 heads, 4 kv heads, 8 wide", "2 heads, 1 kv head"),
    ],
)
def test_heads_are_counted(tp, heads, local):
    assert f"  {heads}; per rank {local}\n" in str(planned_for("llama", tp))


def test_heads_are_counted_of_another_size():
    text = str(planned_for("llama", 2, num_attention_heads=4, num_key_value_heads=2))
    assert "  4 heads, 2 kv heads, 16 wide; per rank 2 heads, 1 kv head\n" in text and "8 heads" not in text


@pytest.mark.parametrize(
    ("name", "ending", "role"),
    [
        ("llama", "0.self_attn.q_proj.weight", ("column-parallel", 0)),
        ("llama", "0.self_attn.v_proj.weight", ("column-parallel", 0)),
        ("llama", "0.self_attn.o_proj.weight", ("row-parallel", 1)),
        ("llama", "0.mlp.up_proj.weight", ("column-parallel", 0)),
        ("llama", "0.mlp.down_proj.weight", ("row-parallel", 1)),
        ("gpt2", "h.0.attn.c_attn.weight", ("column-parallel", 1)),  # transposed
        ("gpt2", "h.0.mlp.c_proj.weight", ("row-parallel", 0)),
        ("bert", "0.attention.self.query.bias", ("column-parallel", 0)),
        ("bert", "0.attention.self.query.weight", ("column-parallel", 0)),
    ],
)
def test_splits_have_the_words_of_the_field(name, ending, role):
    found = parameter(planned_for(name, 4), ending)
    assert isinstance(found.layout, Shard) and (found.role, found.layout.dim) == role
    assert any(f"  {found.role}, dim {role[1]}" in line for line in str(planned_for(name, 4)).splitlines())


def test_a_split_vocabulary_is_named():
    plan = make_plan(transformer("llama"), 2, pins={"*embed_tokens.weight": Split(0), "lm_head.weight": Split(0)})
    assert parameter(plan, "embed_tokens.weight").role == "vocabulary-parallel"
    assert parameter(plan, "lm_head.weight").role == "column-parallel"
    columns = make_plan(transformer("llama"), 2, pins={"*embed_tokens.weight": Split(1)})
    assert parameter(columns, "embed_tokens.weight").role == "column-parallel"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_repeated_layers_are_folded(name):
    field = {"llama": "num_hidden_layers", "gpt2": "n_layer", "bert": "num_hidden_layers"}[name]
    two, four = planned_for(name, 2), planned_for(name, 2, **{field: 4})
    headings = [
        {
            line.replace(f" x {n}  ", " x n  ")
            for line in str(plan).split("Left whole")[0].splitlines()
            if f" x {n}  " in line
        }
        for n, plan in ((2, two), (4, four))
    ]
    assert headings[0] == headings[1] and len(headings[0]) == 4
    assert len(four.blocks) == len(two.blocks) + 2 * 4
    assert " x 2  " not in str(four) and " x 4  " not in str(two)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 4), ("bert", 4)])
def test_whole_parameters_are_listed_with_their_reason(name, tp):
    plan = planned_for(name, tp)
    listed = str(plan).split("Left whole, and why")[1]
    whole = [p for p in plan.parameters if p.layout == I]
    assert whole and all(p.reason and p.role == "whole" and f" {p.first}" in listed for p in whole)
    assert all(p.reason is None and p.role != "whole" for p in plan.parameters if p.layout != I)
    assert not any(f"    {p.name}" in listed for p in plan.parameters if p.layout != I)


def test_the_operator_to_blame_is_the_right_one():
    norm = parameter(planned_for("gpt2", 2), "h.0.ln_1.weight")
    assert norm.reason == "aten.layer_norm works along the whole of dim 2 of its input"
    scale = parameter(planned_for("llama", 2), "0.input_layernorm.weight")
    assert scale.reason and scale.reason.startswith("aten.mul.Tensor could split dim 0, but ")
    bias = parameter(planned_for("bert", 4), "0.output.dense.bias")
    assert bias.reason and "is split over the summed dimension" in bias.reason


class Distances(nn.Module):
    """Distances to learnt points: `cdist` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.unread = nn.Parameter(torch.randn(32, HIDDEN)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points)


def test_an_operator_without_a_rule_is_blamed():
    plan = of_tokens(Distances())
    assert parameter(plan, "points").reason == "aten.cdist has no rule, so it runs whole"
    assert parameter(plan, "unread").reason == "nothing reads it"
    assert of_tokens(Distances(), tp=1).parameters[0].reason == "there is one rank"


def test_a_pin_is_named():
    model = Einsum()
    assert parameter(of_tokens(model, pins={"up": Replicate()}), "up").reason == "pinned by the user"
    assert parameter(of_tokens(model), "up").role == "column-parallel"


# blocks, by structure alone


class Chain(nn.Module):
    """A pair of products with or without a gate, under names that say nothing."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(HIDDEN, 96), nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(x)
        return x + self.c(torch.sigmoid(self.a(x)) * hidden if self.gated else nn.functional.gelu(hidden))


def test_blocks_are_found_by_structure():
    assert ("mlp", "gated, 96 wide") in blocks(of_tokens(Chain(gated=True)))
    assert ("mlp", "96 wide") in blocks(of_tokens(Chain(gated=False)))
    assert ("mlp", "128 wide") in blocks(of_tokens(Einsum()))
    for attention in (Attention(), SelfAttention(True), SelfAttention(False)):
        assert ("attention", "8 heads, 8 wide") in blocks(of_tokens(attention))
    assert not any(kind == "attention" for kind, _ in blocks(of_tokens(Chain(gated=True))))


def test_blocks_of_library_models():
    kinds = {name: {b.kind for b in planned_for(name, 2).blocks} for name in ("llama", "gpt2", "bert")}
    assert all(k >= {"attention", "mlp", "norm", "embedding", "head"} for k in kinds.values())
    llama = planned_for("llama", 2)
    (attention,) = {b.parameters for b in llama.blocks if b.module.endswith("layers.0.self_attn")}
    assert [n.split(".")[-2] for n in attention] == ["q_proj", "k_proj", "v_proj", "o_proj"]


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
    assert plan.totals.stored == pytest.approx(4 * plan.totals.local_parameters)
    assert plan.totals.bound <= plan.totals.seconds * (1 + 1e-6)


def communicating(sharded: Sharded, planned: Planned) -> int:
    """Conversions of a per-rank program that send bytes, read off the call targets alone."""
    primitives = {kind.name: kind.primitive for kind in conversions.KINDS.values()}
    count = 0
    for n in sharded.graph.nodes:
        name = getattr(n.target, "__name__", "")
        if n.op != "call_function" or name not in primitives:
            continue
        source, target = sharded.layouts[n.args[0]], sharded.layouts[n]
        back = conversions.KINDS.get(conversions.key(to_runtime(target.dual), to_runtime(source.dual)))
        graded = sharded.origin[n][0] in planned.grads
        count += bool(primitives[name] or (graded and back is not None and back.primitive))
    return count


def test_every_collective_of_the_program_is_in_the_plan():
    model = transformer("llama")
    planned, sharded, builder = stages(model, Inputs(**inputs_of(model)), 2)
    plan = describe(planned, sharded, builder, "Llama", "training", (), [])
    assert len(plan.collectives) == communicating(sharded, planned) > 4
    gone = next(
        n
        for n in sharded.graph.nodes
        if "conversion" in n.meta and n.target is conversions.function_for(("P", "sum"), ("I",))
    )
    del gone.meta["conversion"]
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
    return make_plan(model, 8, example_inputs={"input_ids": ids}, cluster="h100")


def per_block(plan: Plan) -> dict[str, set[tuple[str, ...]]]:
    """Kind -> what the blocks of that kind send."""
    out: dict[str, set[tuple[str, ...]]] = {}
    for i, block in enumerate(plan.blocks):
        sent = tuple(sorted(c.name for c in plan.collectives if c.block == i))
        out.setdefault(block.kind, set()).add(sent)
    return out


def test_llama_8b_on_nvlink_is_megatrons_plan_with_sequence_parallelism():
    plan = llama_8b(1, 4096)
    sent = per_block(plan)
    assert sent["attention"] == sent["mlp"] == {("g", "g_star")}
    assert sent["norm"] == {("f",)}  # the weight's gradient, in the backward only
    assert all(c.forward is None for c in plan.collectives if c.name == "f")
    assert {c.change for c in plan.collectives if c.name == "g"} == {"S(1) -> R"}
    assert all(c.block is not None for c in plan.collectives)
    assert "32 heads, 8 kv heads, 128 wide; per rank 4 heads, 1 kv head" in str(plan)


def test_short_sequences_are_not_split():
    sent = per_block(llama_8b(1, 128))
    assert sent["attention"] == sent["mlp"] == {("f", "f_star")}


# golden texts


@pinned_versions
@pytest.mark.parametrize(
    ("name", "tp", "changed"),
    [("llama", 2, {}), ("llama", 4, {"num_hidden_layers": 4}), ("gpt2", 4, {}), ("bert", 2, {})],
)
def test_plans_as_text(name, tp, changed, golden):
    plan = planned_for(name, tp, **changed)
    layers = "".join(f"-{n}-layers" for n in changed.values())
    golden(f"plan-{name}{layers}-tp{tp}", render(plan))
    assert render(Plan.from_json(plan.to_json())) == str(plan)


@pinned_versions
def test_a_program_as_text(golden):
    model = transformer("llama", num_hidden_layers=1)
    _, sharded, _ = stages(model, Inputs(**inputs_of(model)), 2)
    golden("graph-llama-tp2", render_graph(sharded.graph, sharded.layouts))


def test_a_program_shows_modules_layouts_and_collectives():
    model = transformer("llama", num_hidden_layers=1)
    planned, sharded, _ = stages(model, Inputs(**inputs_of(model)), 4)
    lines = render_graph(sharded.graph, sharded.layouts).splitlines()
    assert "# model.layers.0.self_attn.q_proj" in lines
    marked = [line for line in lines if any(f"= {m}(" in line for m in ("f", "f*", "g", "g*", "gather"))]
    assert len(marked) == communicating(sharded, planned)
    assert any(": I [s72, s70, 64] = f*(" in line and "P -> I)" in line for line in marked)
