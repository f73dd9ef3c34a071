"""Bytes of a cache, as plans count them, held against the object that the model's own `generate()` fills."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import autotp
from autotp.driver import compile as pipeline
from benchmarks.helpers.build import Architecture, architectures, build
from benchmarks.helpers.command import installed
from benchmarks.helpers.lists.page import load
from benchmarks.helpers.lists.prompts import planned_for, prompts
from tests.helpers.modules.carried import kept_bytes

LISTED = {a.name: a for a in architectures()}
GENERATING = [name for name, record in load("generation.json")["models"].items() if "own" not in record]
# One of every kind of cache; all are held by `make zoo`.
KINDS = {
    "llama": "heads",
    "deepseek_v3": "latents, of which each layer makes the heads",
    "gemma3_text": "windows, and layers without one",
    "minimax": "states that do not grow, and heads",
    "t5": "of the decoder's tokens, and of the encoder's",
}
UNKNOWN = {  # what a call with `use_cache=True` does not show
    "xlnet": "its memories are plain outputs of every call",
    "recurrent_gemma": "states are attributes of its modules, so that generate() refuses it on ranks",
    "bert-generation": "its config says that it is no decoder, and generate() passes a cache all the same",
    "encoder-decoder": "the same decoder",
    "vision-encoder-decoder": "the same",
    "switch_transformers": "its encoder refuses use_cache=True",
}


def counted(architecture: Architecture) -> tuple[autotp.Plan, int, float]:
    """The plan of a small model; bytes of its own cache after the prompts, and by which a token makes it longer, on
    average over as many tokens again."""
    model: Any = build(architecture)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    inputs = prompts(model)
    given = planned_for(model, inputs)
    plan = autotp.plan(model, 1, example_inputs=given, objective="prefill", check_capture=False)
    count = given["decoder_input_ids"].shape[1] if "decoder_input_ids" in given else 1
    more = max(plan.totals.length, 1) if count == 1 else count
    own, later = (kept_bytes(model, inputs, n) for n in (count, count + more))
    return plan, own, (later - own) / more


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS else (pytest.mark.zoo, pytest.mark.timeout(0))) for n in GENERATING]
)
def test_a_plan_counts_what_generate_keeps(name, request):
    if not installed(LISTED[name]):
        pytest.skip("not in this transformers")
    if name in UNKNOWN:
        request.applymarker(pytest.mark.xfail(reason=UNKNOWN[name], strict=True))
    plan, own, token = counted(LISTED[name])
    assert plan.memory.cache == own
    if plan.totals.length:  # else every length is a number in the capture, and nothing says what grows
        assert plan.memory.cache_token * plan.totals.examples == pytest.approx(token)


def test_latents_are_not_counted_as_the_heads_that_are_made_of_them(monkeypatch):
    """A layer of DeepSeek-V3 at its widths, 8 ranks: each holds all of the latent, 512 + 64 wide; by a guess 16 heads
    as they enter the attention."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 1024}
    config = transformers.DeepseekV3Config(**sizes, intermediate_size=1024)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    asked: dict[str, Any] = {"objective": "decode", "check_capture": False}
    asked["example_inputs"] = {"input_ids": torch.zeros(2, 1024, dtype=torch.long)}
    plan = autotp.plan(model, 8, **asked)
    assert plan.memory.cache_token == (512 + 64) * 2 and plan.memory.cache == 2 * 1024 * plan.memory.cache_token
    found = plan.decoding
    assert found is not None and found.limit.cache == plan.memory.cache
    monkeypatch.setattr(pipeline, "begun_cache", lambda *_: None)
    guess = autotp.plan(model, 8, **asked).memory
    assert guess.cache == 2 * 1024 * 16 * (192 + 128) * 2 > 8 * plan.memory.cache and guess.cache_token == 0
