"""`generate()` on ranks gives token for token what the unsharded model's gives, and the cache lies sharded."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline
from transformers.pipelines import base

import autotp
from autotp.driver import compile as driver
from autotp.passes.shard import decide
from benchmarks.helpers.lists.generated import doubled
from tests.helpers.compare import mesh_of
from tests.helpers.errors import message_of
from tests.helpers.grouped_heads import EXACT, grouped, padded


def generating(rank: int, world: int, group: Any) -> dict[str, Any]:
    with (
        doubled(),
        torch.no_grad(),
        patch.object(driver, "prepare", wraps=driver.prepare) as captures,
        patch.object(decide, "solve", wraps=decide.solve) as solved,
    ):
        model, batch = grouped(), padded()
        sharded: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group))
        options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}

        def both(seed: int = 0, **more: Any) -> tuple[bool, float, Any]:
            torch.manual_seed(5)
            wanted = model.generate(**batch, **(options | more))
            torch.manual_seed(5 + seed)
            got = sharded.generate(**batch, **(options | more))
            gaps = [float((a - b).abs().max()) for a, b in zip(got.logits, wanted.logits, strict=True)]
            return bool((got.sequences == wanted.sequences).all()), max(gaps), got

        found: dict[str, Any] = {}
        *found["greedy"], got = both()
        found["captures"], found["solved"] = captures.call_count, solved.call_count
        found["heads"] = got.past_key_values.layers[0].keys.shape[1]
        found["more"] = both(max_new_tokens=30)[:2]
        found["sampled"] = both(seed=rank, do_sample=True, temperature=2.0)[:2]
        beams = {"num_beams": 3, "max_new_tokens": 6}
        found["beams"] = bool((sharded.generate(**batch, **beams) == model.generate(**batch, **beams)).all())
        found["captures after"] = captures.call_count
        static = {"max_new_tokens": 4, "cache_implementation": "static"}
        found["static"] = bool((sharded.generate(**batch, **static) == model.generate(**batch, **static)).all())
        found["control"] = control(sharded, model)

        found["pipeline"] = piped(sharded, model)
        wrong = DynamicCache(config=model.config)
        model(**batch, past_key_values=wrong)
        step = {"input_ids": batch["input_ids"][:, :1], "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
        found["foreign"] = message_of(lambda: sharded(**step, past_key_values=wrong, use_cache=True))
        other = {**batch, "input_ids": batch["input_ids"] + rank}
        found["prompts"] = message_of(lambda: sharded.generate(**other, max_new_tokens=2))
        return found


def piped(sharded: Any, model: Any) -> tuple[bool, int]:
    """Whether a pipeline says the same with both, and how many errors were logged."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(30)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1")
    with patch.object(base.logger, "error") as errors:
        pipes = [pipeline("text-generation", model=m, tokenizer=tokenizer) for m in (sharded, model)]
        texts = [pipe("w5 w6 w7", max_new_tokens=4, do_sample=False) for pipe in pipes]
    return texts[0] == texts[1], errors.call_count


def control(sharded: Any, model: Any) -> tuple[float, float]:
    """How far a step is off with the cache as it is, and with one entry of one rank's part changed."""
    ids, mask = torch.arange(3, 15).view(2, 6), torch.ones(2, 7, dtype=torch.int64)
    wanted = model(input_ids=ids).logits[:, -1]
    gaps = []
    for change in (0.0, 1e-3):
        cache: Any = DynamicCache(config=model.config)
        sharded(input_ids=ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True)
        cache.layers[0].values[1, 0, 2, 0] += change
        out = sharded(input_ids=ids[:, 5:], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)
        gaps.append(float((out.logits[:, -1] - wanted).abs().max()))
    return gaps[0], gaps[1]


@pytest.mark.ranks
def test_llama_generates_the_same_tokens_on_two_ranks(pool):
    on_ranks = pool.run(generating, world=2)
    # Compile's own program, and under its plan those of calls without a past and with one: each on one rank for all.
    for count in ("solved", "captures", "captures after"):
        assert [found[count] for found in on_ranks] == [3, 0], count
    for found in on_ranks:
        for name in ("greedy", "more", "sampled"):
            same, gap = found[name]
            assert same and gap < EXACT, (name, found[name])
        assert found["beams"] and found["static"] and found["heads"] == 1
        exact, changed = found["control"]
        assert exact < EXACT < changed
        assert found["pipeline"] == (True, 0)
        assert "unsharded model" in found["foreign"]
        assert "do not agree on the values of the inputs" in found["prompts"]
