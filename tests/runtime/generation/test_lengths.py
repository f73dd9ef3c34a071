"""Programs of generation take any length: a long text captures nothing after its second token."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.driver import compile as pipeline

TOKENS = 512


def test_one_pair_of_programs_is_for_static_caches_of_every_length():
    """How long it is is a number of the caller's: it was a constant of both programs, which were captured anew."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    model: Any = LlamaForCausalLM(config).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    ids = torch.randint(3, 30, (3, 9))
    model.generate(ids, max_new_tokens=3, cache_implementation="static")  # which leaves the length of its cache there
    sharded: Any = autotp.compile(model, tp=1, example_inputs={"input_ids": ids}, check_capture=False)
    made: list[int] = []
    with torch.no_grad(), patch.object(pipeline, "prepare", wraps=pipeline.prepare) as captures:
        for batch, prompt, tokens in ((2, 6, 4), (2, 6, 12), (3, 9, 5)):
            call = {"input_ids": ids[:batch, :prompt], "attention_mask": torch.ones(batch, prompt, dtype=torch.int64)}
            options = {"max_new_tokens": tokens, "cache_implementation": "static"}
            got = sharded.generate(**call, **options)
            made.append(captures.call_count)
            assert torch.equal(got, model.generate(**call, max_new_tokens=tokens))
    # A call on fake tensors shows that the cache is asked to be so long, which is then a size.
    assert made == [2, 2, 2] and len(sharded._programs_made) == 3
    assert not any(isinstance(x.node.meta["val"].shape[2], int) for x in sharded._programs_made[-1].capture.inputs[1:3])


def test_512_tokens_after_one_capture_two_programs():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 30, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": TOKENS + 4}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0))
    model = model.double().eval()
    for p in model.parameters():
        p.data += 0.5 * torch.randn_like(p)
    prompt = torch.tensor([[5], [9]])  # so that the first past is of one token
    sharded: Any = autotp.compile(model, tp=1, example_inputs={"input_ids": prompt}, check_capture=False)
    counts: list[int] = []
    with torch.no_grad(), patch.object(pipeline, "prepare", wraps=pipeline.prepare) as captures:

        def counted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts.append(captures.call_count)
            return scores

        mask = torch.ones_like(prompt)
        made = sharded.generate(
            input_ids=prompt, attention_mask=mask, max_new_tokens=TOKENS, logits_processor=[counted]
        )
        assert counts[:2] == [1, 2] and len(counts) == TOKENS and counts[-1] == 2
        wanted = model(made[:, :-1]).logits.argmax(-1)
    assert torch.equal(made[:, 1:], wanted) and len(made.unique()) > 2
    past = sharded._programs_made[-1].capture
    lengths = [x.node.meta["val"].shape[2] for x in past.inputs if x.kind.carried]
    assert all(past.ranges[n.node.expr][0] <= 1 for n in lengths)
