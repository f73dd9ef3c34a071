"""Whole models: equal to the original at every rank count, with storage and arithmetic really split."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.capture.selfcheck import Trial
from autotp.compat import tree_leaves
from autotp.driver.verify import compare
from autotp.errors import InputError
from autotp.inputs import Inputs, without_cache
from autotp.proof.report import Report
from tests.helpers.models import PLAIN, TWELVE, build, captured, inputs_of, planned, transformer, values

EXACT = 1e-10  # float64


def equal(report: Report) -> bool:
    assert report.ok, str(report)
    return report.output_error <= EXACT and report.gradient_error <= EXACT


def whole(plan: autotp.Plan) -> int:
    """Elements of the vectors that stay whole: norm scales, and biases of a dimension that is whole."""
    return sum(p.local[0] for p in plan.parameters if len(p.shape) == 1 and p.local == p.shape)


def split(plan: autotp.Plan) -> bool:
    """Parameters within a tenth of 1/tp, besides the vectors that stay whole; arithmetic within 1.15/tp."""
    t = plan.totals
    assert t.parameters and t.flops
    return (
        t.local_parameters <= 1.1 * t.parameters / plan.tp + whole(plan) and t.local_flops <= 1.15 * t.flops / plan.tp
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", TWELVE)
def test_a_model_is_equal_and_split(name, tp):
    plan, program, sharded = planned(name, tp)
    assert equal(compare(program, sharded, values(name)))
    assert split(plan)


def test_a_model_with_a_loss_has_its_values_and_gradients_compared():
    """A loss is taken apart in a copy of the graph, whose values are the captured one's by name."""
    model = transformer("llama-short")
    report = autotp.verify(model, 2, inputs_of(model) | {"labels": inputs_of(model)["input_ids"]})
    assert equal(report)
    assert report.values > 100
    assert report.gradient_error > 0


@pytest.mark.parametrize("name", TWELVE)
def test_the_captured_graph_is_the_model(name):
    model, inputs = build(name)
    trial = Trial.of(model, without_cache(model, inputs)[0], torch.device("cpu"))
    error = trial.compare(captured(name)[0])
    assert error <= 1e-6  # float32: the same operators


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_a_module_that_no_library_wrote_is_equal_and_split(name, tp):
    model, inputs = build(name)
    report = autotp.verify(model, tp, inputs)
    assert equal(report) and report.plan is not None
    assert split(report.plan)
    matrices = {p.name for p in report.plan.parameters if len(p.shape) > 1 and p.local == p.shape}
    assert matrices <= {"head.weight"}  # of the conv net: 8 rows


UNEVEN = ("lm_head.weight", "model.embed_tokens.weight", "*.up_proj.weight", "*.gate_proj.weight")


@pytest.mark.parametrize("tp", [2, 4])
def test_an_uneven_vocabulary_and_width_are_split(tp):
    model, inputs = build("llama-uneven")
    report = autotp.verify(model, tp, inputs, pins={pattern: Shard(0) for pattern in UNEVEN})
    assert equal(report) and report.plan is not None
    assert split(report.plan)
    shapes = {p.name: p.local for p in report.plan.parameters}
    assert shapes["lm_head.weight"][0] == shapes["model.embed_tokens.weight"][0] == -(-257 // tp)
    assert (
        shapes["model.layers.1.mlp.up_proj.weight"][0]
        == shapes["model.layers.1.mlp.down_proj.weight"][1]
        == -(-129 // tp)
    )


@pytest.mark.parametrize("name", TWELVE)
def test_one_rank_is_bitwise_the_original(name):
    model, inputs = build(name)
    sharded = autotp.compile(model, tp=1, example_inputs=inputs)
    found, own = (tensors(m(*inputs.args, **inputs.kwargs)) for m in (sharded, model))
    assert len(found) == len(own) and all(map(torch.equal, found, own))
    for outputs in (found, own):
        torch.stack([v.sin().sum() for v in outputs if v.requires_grad]).sum().backward()
    gradients = sharded.full_grad_dict()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    assert gradients.keys() >= expected.keys()
    assert not [n for n, g in expected.items() if g is not None and not torch.equal(g, gradients[n])]


def tensors(outputs: object) -> list[torch.Tensor]:
    return [v for v in tree_leaves(outputs) if isinstance(v, torch.Tensor)]


def forward(plan: autotp.Plan) -> Counter[str]:
    """Primitives of the forward."""
    return Counter(c.forward for c in plan.collectives if c.forward)


def test_a_parallel_block_is_reduced_once():
    one, two = (autotp.plan(m, 2, example_inputs=inputs_of(m)) for m in map(layers_of_gptj, (1, 2)))
    layer = forward(two) - forward(one)
    assert layer in (Counter({"all_reduce": 1}), Counter({"reduce_scatter": 1, "all_gather": 1}))


def layers_of_gptj(count: int) -> nn.Module:
    return transformer("gptj", n_layer=count)


def test_a_model_with_a_cache_is_captured_without_it():
    model = transformer("llama", use_cache=True)
    plan = autotp.plan(model, 2, example_inputs=inputs_of(model))
    assert any("without the key/value cache" in note and "config.use_cache=True" in note for note in plan.notes)
    assert equal(autotp.verify(model, 2, inputs_of(model), plan=plan))


def test_a_cache_passed_in_is_refused():
    model: Any = transformer("llama", use_cache=True)
    cache = DynamicCache(config=model.config)
    with pytest.raises(InputError, match="past_key_values.*cache"):
        autotp.verify(model, 2, {**inputs_of(model), "past_key_values": cache})


# Lengths that the ranks do not divide, longer and shorter than the 2 x 16 that was captured.
@pytest.mark.parametrize("size", [(3, 11), (2, 21), (5, 4)])
@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("llama", None), ("llama", True), ("bert", True), ("gpt2", None)]
)
def test_one_capture_serves_other_sizes(name, sequence_parallel, size):
    model, _ = build(name)
    inputs = Inputs(**inputs_of(model, *size))
    _, program, sharded = planned(name, 4, sequence_parallel)
    given = values(name, inputs)
    assert program.program.accepts([given.nodes[x.node][0] for x in program.program.inputs]) is None
    assert equal(compare(program, sharded, given))


LAYER = re.compile(r"(layers|layer|h)\.\d")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_sequence_parallelism_is_forced(name, tp):
    plan, program, sharded = planned(name, tp, True)
    assert equal(compare(program, sharded, values(name)))
    layers = [c for c in plan.collectives if c.op != "parameter" and LAYER.search(c.source) and c.block is not None]
    assert {c.forward for c in layers} == {"all_gather", "reduce_scatter"}
    assert sum(c.name == "g_star" for c in layers) == 2 * 2  # after each row-parallel matmul of two layers


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_sequence_parallelism_is_forbidden(name, tp):
    plan, program, sharded = planned(name, tp, False)
    assert equal(compare(program, sharded, values(name)))
    assert forward(plan)["all_reduce"] and not forward(plan)["reduce_scatter"]


def llama_8b(layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def test_the_plan_of_llama_8b_is_megatrons_with_sequence_parallelism():
    """One g before q, k, v and one before gate, up; a g* after each row-parallel matmul; nothing else in a layer but
    the sums of the two norm weights' gradients (Korthikanti et al. 2022, section 4.2.2)."""
    ids = torch.zeros(1, 4096, dtype=torch.long)
    plan = autotp.plan(llama_8b(3), 8, example_inputs={"input_ids": ids}, cluster="h100", check_capture=False)
    for k in range(3):
        layer = f"model.layers.{k}."
        inside = [c for c in plan.collectives if c.source.startswith(layer)]
        weights = [c for c in inside if c.op == "parameter"]
        assert sorted(c.source for c in weights) == [
            layer + n for n in ("input_layernorm.weight", "post_attention_layernorm.weight")
        ]
        assert all(c.name == "f" for c in weights)
        activations = Counter((c.name, c.change) for c in inside if c.op != "parameter")
        assert activations == {("g", "S(1) -> R"): 2, ("g_star", "P -> S(1)"): 2}
        made = {(c.name, c.source.removeprefix(layer)) for c in inside if c.op != "parameter"}
        assert made == {
            ("g", "input_layernorm"), ("g", "post_attention_layernorm"),
            ("g_star", "self_attn.o_proj"), ("g_star", "mlp.down_proj"),
        }  # fmt: skip
        readers = {c.module.removeprefix(layer) for c in inside if c.name == "g"}
        assert readers == {"self_attn", "mlp"}
        assert all(c.block is not None for c in inside) and all(c.forward is None for c in inside if c.name == "f")
    assert "32 heads, 8 kv heads, 128 wide; per rank 4 heads, 1 kv head" in plan.report()
    assert split(plan)


def test_the_digest_is_the_same_on_every_device():
    program = captured("llama")[0]
    before, found = program.digest(), [n for n in program.graph.nodes if "device" in n.kwargs]
    given = {n: n.kwargs for n in found}
    for n in found:
        n.kwargs = {**n.kwargs, "device": torch.device("cuda", 3)}
    assert found and program.digest() == before
    for n in found:
        n.kwargs = given[n]
    found[0].kwargs = {**found[0].kwargs, "dtype": torch.float16}
    assert program.digest() != before
    found[0].kwargs = given[found[0]]
