"""Programs that are made before anybody waits for them: the calls that follow capture nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.driver import compile as driver
from autotp.errors import InputError, StateError
from tests.helpers.compare import mesh_of
from tests.helpers.errors import message_of

IDS = torch.arange(3, 15).view(2, 6)
LABELLED = {"input_ids": IDS, "labels": IDS}


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def test_named_kinds_and_examples_are_captured_ahead_and_nothing_afterwards():
    model = llama()
    sharded: Any = autotp.compile(model, 1, example_inputs={"input_ids": IDS}, check_capture=False)
    state = torch.get_rng_state()
    with patch.object(driver, "prepare", wraps=driver.prepare) as captures:
        assert sharded.warmup("prefill", "decode", LABELLED) == 3 and captures.call_count == 3
        assert sharded.warmup("decode") == 0
        assert sharded.generate(IDS, max_new_tokens=5).equal(model.generate(IDS, max_new_tokens=5))
        torch.testing.assert_close(sharded(**LABELLED).loss, model(**LABELLED).loss)
        assert captures.call_count == 3
        assert sharded.generate(IDS[:1], max_new_tokens=5).equal(model.generate(IDS[:1], max_new_tokens=5))
        assert captures.call_count == 3  # of a batch of one too
        with torch.no_grad():  # the model asks whether there is more than one token
            sharded.generate(IDS[:, :1], max_new_tokens=2)
        assert captures.call_count == 4
    assert torch.equal(state, torch.get_rng_state())


def test_a_kind_of_another_name_and_a_model_without_generate_are_refused():
    sharded: Any = autotp.compile(torch.nn.Linear(4, 4), 1, example_inputs=torch.randn(2, 4))
    with pytest.raises(
        InputError, match=r"warmup\('prefil'\): kinds of calls are 'prefill', 'decode', 'static'; other"
    ):
        sharded.warmup("prefil")
    with pytest.raises(StateError, match="has no generate"):
        sharded.warmup("prefill")


def parting(rank: int, world: int, group: Any) -> list[str]:
    sharded: Any = autotp.compile(torch.nn.Linear(4, 4), example_inputs=torch.randn(2, 4), mesh=mesh_of(group))
    kinds = ("decode", "prefil") if rank else ("prefil",)
    return [message_of(lambda: sharded.warmup(*kinds)), message_of(lambda: sharded.warmup("prefil"))]


@pytest.mark.ranks
def test_ranks_that_ask_for_other_kinds_are_told(pool):
    for apart, unknown in pool.run(parting, world=2):
        assert "do not agree on the options of warmup()" in apart and "kinds of calls are" in unknown
