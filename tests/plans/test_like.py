"""A saved plan for another depth, degree or width of the same architecture."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

import autotp
from autotp.errors import InputError, PlanError
from tests.helpers.models import build, inputs_of, transformer


@cache
def direct(name: str, tp: int, layers: int = 2) -> autotp.Plan:
    return made(name, tp, layers)


def made(name: str, tp: int, layers: int = 2, **options: Any) -> autotp.Plan:
    fields = {"gpt2": "n_layer", "t5": "num_layers"}
    model = transformer(name, **{fields.get(name, "num_hidden_layers"): layers})
    return autotp.plan(model, tp, example_inputs=inputs_of(model), **options)


def saved(plan: autotp.Plan) -> autotp.Plan:
    return autotp.Plan.from_json(plan.to_json())


def dims(plan: autotp.Plan) -> dict[str, int | None]:
    return {n: getattr(x, "dim", None) for n, x in plan.placements.items()}


def figures(plan: autotp.Plan) -> Any:
    """What a plan comes to."""
    sent = [(c.name, c.change, c.bytes, c.forward, c.backward) for c in plan.collectives]
    return plan.parameters, plan.blocks, sent, plan.totals.seconds, plan.totals.parameter_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_another_depth_is_as_planned_directly(name: str):
    found, wanted = made(name, 2, 4, like=saved(direct(name, 2))), direct(name, 2, 4)
    assert found.placements == wanted.placements
    assert figures(found) == figures(wanted)
    assert found.notes[-1].startswith(f"{len(found.parameters)} of {len(found.parameters)} parameters are placed as")
    if name == "llama":
        assert found.decisions == wanted.decisions


@pytest.mark.parametrize(("tp", "to"), [(2, 4), (4, 2)])
def test_another_degree_keeps_what_divides(tp: int, to: int):
    found, first = made("llama", to, like=saved(direct("llama", tp))), direct("llama", tp)
    assert dims(found) == dims(first)
    assert found.totals.parameter_bytes == direct("llama", to).totals.parameter_bytes
    assert found.notes[-1] == f"21 of 21 parameters are placed as in the plan for tp={tp} that this is like"


@pytest.mark.parametrize(
    ("tp", "to", "why"),
    [
        (2, 3, "8 heads and 4 kv heads do not divide by 3 ranks"),
        (2, 16, "8 heads and 4 kv heads do not divide by 16 ranks"),
        (8, 2, "4 kv heads do not divide by 8 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_decided_anew(tp: int, to: int, why: str):
    found, first = made("llama", to, like=saved(direct("llama", tp))), direct("llama", tp)
    attention = {n for n in found.placements if "self_attn" in n}
    assert {n: d for n, d in dims(found).items() if n not in attention} == {
        n: d for n, d in dims(first).items() if n not in attention
    }
    names = [f"model.layers.*.self_attn.{x}_proj.weight" for x in "qkvo"]
    assert found.notes[-2].startswith("13 of 21 parameters")
    assert found.notes[-1] == f"decided anew: {', '.join(names)}: {why}"


def test_a_placement_that_is_not_legal_any_more_is_decided_anew():
    model, inputs = build("convolutions")
    first = autotp.plan(model, 2, example_inputs=inputs)
    found = autotp.plan(model, 40, example_inputs=inputs, like=first)  # a convolution runs on no empty shard of 32
    told = [n.split(": the pin")[0] for n in found.notes if n.startswith("decided anew") and "cannot be kept" in n]
    assert told == [f"decided anew: {n}" for n in ("first.weight", "first.bias", "second.weight")], found.notes
    assert set(map(str, found.placements.values())) == {"I"}


def test_other_sizes_of_the_same_architecture():
    wide = transformer("llama", hidden_size=96, intermediate_size=160, vocab_size=257)
    found = autotp.plan(wide, 2, example_inputs=inputs_of(wide), like=direct("llama", 2))
    assert dims(found) == dims(direct("llama", 2)) and found.placements != direct("llama", 2).placements


def test_the_users_pins_come_first():
    pins = {"*.down_proj.weight": Replicate(), "model.embed_tokens.weight": Shard(1)}
    found = made("llama", 2, like=direct("llama", 2), pins=pins)
    moved = {n for n, d in dims(found).items() if d != dims(direct("llama", 2))[n]}
    assert moved == {f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)} | {"model.embed_tokens.weight"}


def test_layers_that_lie_differently_keep_that_by_their_own_names():
    pins = {"model.layers.1.mlp.up_proj.weight": Replicate()}
    first = made("llama", 2, pins=pins)
    found = made("llama", 2, 4, like=saved(first))
    assert {n: d for n, d in dims(found).items() if n in first.placements} == dims(first)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama-tied", "llama-bias"])
def test_another_architecture_is_refused(name: str):
    words = "like= is a plan for LlamaForCausalLM with other parameters than this model has, such as .*which only the"
    with pytest.raises(PlanError, match=words):
        made(name, 2, like=direct("llama", 2))


@pytest.mark.parametrize(
    ("tp", "like", "words"), [(2, "plan.json", "like is str; give"), ("auto", None, "tp='auto' compares plans")]
)
def test_wrong_arguments(tp: Any, like: Any, words: str):
    with pytest.raises(InputError, match=words):
        made("llama", tp, like=like or direct("llama", 2))


def test_the_loaded_plan_can_be_explained_and_exported_again():
    found = made("llama", 2, like=saved(direct("llama", 2)))
    assert found.to_tp_plan() == direct("llama", 2).to_tp_plan()
    told = found.explain("model.layers.0.mlp.down_proj.weight")
    assert told.alternatives[0].chosen and len(told.alternatives) > 1 and "pin" not in told.binds
