"""Plans and programs as text, the blocks that plans name, and the reasons that they give."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Split

from autotp.api import plan as make_plan
from autotp.inputs import Inputs
from autotp.ir.layouts import I, Shard
from autotp.plans.plan import Plan
from autotp.plans.show.rank_program import render_graph
from tests.helpers.models import HIDDEN, Attention, Einsum, SelfAttention, inputs_of, transformer
from tests.helpers.plans import blocks, communicating, of_tokens, parameter, planned_for, stages

pinned_versions = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not transformers.__version__.startswith("5.23."),
    reason="the golden texts show the operators that the pinned versions capture",
)


# text


@pytest.mark.parametrize(
    ("tp", "heads", "local"),
    [
        (2, "8 heads, 4 kv heads, 8 wide", "4 heads, 2 kv heads"),
        (4, "8 heads, 4 kv heads, 8 wide", "2 heads, 1 kv head"),
    ],
)
def test_heads_are_counted(tp, heads, local):
    assert f"  {heads}; per rank {local}\n" in planned_for("llama", tp).report()


class Scaled(nn.Sequential):
    """Layers, and a weight in a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 8))
        self.register_buffer("scale", torch.ones(1, 8))

    def forward(self, input: Tensor) -> Tensor:
        return self[1](self[0](input)) * self.scale


def test_a_block_that_reads_a_weight_in_a_buffer_is_shown():
    plan = make_plan(Scaled(), 2, example_inputs=torch.zeros(2, 8))
    assert "scale" in {n for b in plan.blocks for n in b.parameters}
    assert "MLP  16 wide" in plan.report()


def test_heads_are_counted_of_another_size():
    text = planned_for("llama-short", 2, num_attention_heads=4, num_key_value_heads=2).report()
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
    assert any(f"  {found.role}, dim {role[1]}" in line for line in planned_for(name, 4).report().splitlines())


def test_a_split_vocabulary_is_named():
    model, pins = transformer("llama"), {"*embed_tokens.weight": Split(0), "lm_head.weight": Split(0)}
    plan = make_plan(model, 2, example_inputs=inputs_of(model), pins=pins)
    assert parameter(plan, "embed_tokens.weight").role == "vocabulary-parallel"
    assert parameter(plan, "lm_head.weight").role == "column-parallel"
    columns = make_plan(model, 2, example_inputs=inputs_of(model), pins={"*embed_tokens.weight": Split(1)})
    assert parameter(columns, "embed_tokens.weight").role == "column-parallel"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_repeated_layers_are_folded(name):
    field = {"llama": "num_hidden_layers", "gpt2": "n_layer", "bert": "num_hidden_layers"}[name]
    two, four = planned_for(name, 2), planned_for(name, 2, **{field: 4})
    headings = [
        {
            line.replace(f" x {n}  ", " x n  ")
            for line in plan.report().split("Left whole")[0].splitlines()
            if f" x {n}  " in line
        }
        for n, plan in ((2, two), (4, four))
    ]
    assert headings[0] == headings[1] and len(headings[0]) == 4
    assert len(four.blocks) == len(two.blocks) + 2 * 4
    assert " x 2  " not in four.report() and " x 4  " not in two.report()


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 4), ("bert", 4)])
def test_whole_parameters_are_listed_with_their_reason(name, tp):
    plan = planned_for(name, tp)
    listed = plan.report().split("Left whole, and why")[1]
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


class Eigenvectors(nn.Module):
    """The eigenvectors of a learnt matrix: `_linalg_eigh` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.unread = nn.Parameter(torch.randn(HIDDEN, HIDDEN)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.eigh(self.mixing)[1]


def test_an_operator_without_a_rule_is_blamed():
    plan = of_tokens(Eigenvectors())
    assert parameter(plan, "mixing").reason == "aten.linalg_eigh has no rule, so it runs whole"
    assert parameter(plan, "unread").reason == "nothing reads it"
    assert of_tokens(Eigenvectors(), tp=1).parameters[0].reason == "there is one rank"


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


# golden texts


@pinned_versions
@pytest.mark.parametrize(
    ("name", "tp", "changed"),
    [("llama", 2, {}), ("llama", 4, {"num_hidden_layers": 4}), ("gpt2", 4, {}), ("bert", 2, {"use_cache": False})],
)
def test_plans_as_text(name, tp, changed, golden):
    plan = planned_for(name, tp, **changed)
    layers = f"-{changed['num_hidden_layers']}-layers" if "num_hidden_layers" in changed else ""
    golden(f"plan-{name}{layers}-tp{tp}", plan.report())
    golden(f"overview-{name}{layers}-tp{tp}", str(plan))
    loaded = Plan.from_json(plan.to_json())
    assert (loaded.report(), str(loaded)) == (plan.report(), str(plan))


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
