"""`generate()` with a cache: tokens and scores on any number of ranks, and the forward of a trainer on that module."""

from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.models import transformer

from .runs import IDS

MODELS: dict[str, dict[str, Any]] = {
    "two": {"num_key_value_heads": 2},
    "uneven": {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48},
}


def generated(group: Any, name: str, cache: str) -> dict[str, Tensor]:
    """Tokens and scores, and logits and gradients of a forward of these tokens after it."""
    torch.set_num_threads(1)
    model = transformer("llama-cache-short", **MODELS[name])
    mesh = mesh_of(group) if group is not None else None
    module: Any = autotp.compile(
        model, mesh=mesh, example_inputs={"input_ids": IDS}, tp_invariant=4, check_capture=False
    ).eval()
    torch.manual_seed(7)
    out = module.generate(
        IDS, max_new_tokens=4, cache_implementation=cache, do_sample=cache == "static", output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    outputs = module(input_ids=out.sequences, labels=out.sequences)
    outputs.loss.backward()
    values = {"tokens": out.sequences, "scores": torch.stack(out.logits, 1), "logits": outputs.logits.detach()}
    return values | module.full_grad_dict()


def on_ranks(rank: int, world: int, group: Any, name: str, cache: str) -> dict[str, Tensor]:
    return generated(group, name, cache)


@pytest.mark.parametrize("name, cache, world", [("two", "dynamic", 2), ("uneven", "static", 2)])
def test_tokens_scores_and_a_trainers_forward_have_equal_bits(pool, name: str, cache: str, world: int):
    alone = generated(None, name, cache)  # by parameters that are no DTensors, with which matmul has another kernel
    for values in pool.run(on_ranks, name, cache, world=world):
        assert values.keys() == alone.keys()
        odd = [key for key in alone if not torch.equal(values[key], alone[key])]
        assert not odd, (world, odd)


def test_a_forward_of_the_tokens_has_the_bits_of_a_module_that_never_generated():
    values = generated(None, "two", "dynamic")
    model = transformer("llama-cache-short", **MODELS["two"])
    module = autotp.compile(model, example_inputs={"input_ids": IDS}, tp_invariant=4, check_capture=False).eval()
    tokens = values["tokens"]
    assert torch.equal(module(input_ids=tokens, labels=tokens).logits, values["logits"])
    decoded = values["logits"][:, IDS.shape[1] - 1 : -1]
    assert (decoded - values["scores"]).abs().max() < 1e-5  # not equal: other shapes of products
