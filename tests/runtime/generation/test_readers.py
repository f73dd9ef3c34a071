"""What reads the logits of `generate()` on the ranks, be it one rank's own function, gives the model's own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from tests.helpers.compare import mesh_of

VOCABULARY = 31  # no number of ranks divides it

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True}, "scores": {"output_scores": True},
    "own": {"logits_processor": [lambda ids, scores: scores]},
}  # fmt: skip


def model_and_prompt(vocabulary: int = VOCABULARY) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "n_embd": 12, "n_layer": 1, "n_head": 6, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    model: Any = GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    model.lm_head.weight.data[[9, 28]] = model.lm_head.weight.data[[2]]  # logits that are equal on three ranks
    ids = torch.randint(3, vocabulary, (2, 4))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generating(rank: int, world: int, group: Any) -> list[str]:
    model, batch = model_and_prompt()
    sharded: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group), check_capture=False)
    wrong, options = [], {"max_new_tokens": 5, "return_dict_in_generate": True}
    for name, more in WAYS.items():
        with torch.no_grad():
            torch.manual_seed(1)
            wanted = model.generate(**batch, **options, **more)
            torch.manual_seed(1)
            got = sharded.generate(**batch, **options, **more)
        pairs = zip([got.sequences, *(got.scores or ())], [wanted.sequences, *(wanted.scores or ())], strict=True)
        wrong += [name for a, b in pairs if type(a) is not Tensor or not torch.allclose(a, b, atol=1e-5)]
    return wrong


@pytest.mark.ranks
def test_readers_of_logits_see_the_whole(pool):
    assert pool.run(generating, world=3) == [[]] * 3


def on_slices(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Greedy decoding over dp x tp in half precision, beside the model's own; the first slice ends after a token, and
    the other goes on."""
    model, whole = model_and_prompt(VOCABULARY + 1)
    model.bfloat16()
    own = slice(rank // 2, rank // 2 + 1)  # of the batch, one sequence for each dp rank
    batch = {name: x[own] for name, x in whole.items()}
    sharded: Any = autotp.compile(model, 2, dp=2, example_inputs=batch, check_capture=False)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        ids = whole["input_ids"][:1]
        options["eos_token_id"] = int(model(input_ids=ids).logits[0, -1].argmax())
        tokens = sharded.generate(**batch, **options)
        return {"tokens": tokens.tolist(), "own": model.generate(**batch, **options).tolist()}


@pytest.mark.ranks
def test_greedy_decoding_of_slices_of_a_batch_in_half_precision(pool):
    results = pool.run(on_slices, world=4)
    assert [found["tokens"] for found in results] == [found["own"] for found in results]
    assert [len(found["own"][0]) - 4 for found in results] == [1, 1, 2, 2]  # of sequences of their own
