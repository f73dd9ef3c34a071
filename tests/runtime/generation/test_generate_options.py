"""Options of `generate()`: tokenizers, drafts, and what ranks cannot follow."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of

IDS = torch.tensor([[5, 6, 7, 4]])  # "bcda", whose last letter begins a longer word
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", "ab", "cd"]
BATCHING = ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"]


def tokenizer() -> Any:
    """Of letters, and two pairs of them."""
    by_letters = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("a", "b"), ("c", "d")]))
    by_letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=by_letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def llama(layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens_of(model: Any) -> list[Tensor]:
    """Ended by a string, and drawn after a healed prompt."""
    torch.manual_seed(0)
    words = {"tokenizer": tokenizer(), "max_new_tokens": 4}
    ended = model.generate(IDS, stop_strings=["fs"], do_sample=False, **words)
    return [ended, model.generate(IDS, token_healing=True, do_sample=True, **words)]


def generating(rank: int, world: int, group: Any) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Tokens of a sharded module, and what it says to options that ranks cannot follow."""
    examples = {"input_ids": IDS.repeat(2, 1)}
    sharded: Any = autotp.compile(llama(), example_inputs=examples, mesh=mesh_of(group), check_capture=False)
    dp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    sliced: Any = autotp.compile(llama(), dp=2, mesh=dp, example_inputs=examples, check_capture=False)
    calls = [
        lambda: sharded.generate(IDS, cache_implementation="paged"),
        lambda: sliced.generate(IDS, token_healing=True, tokenizer=tokenizer()),
        lambda: sliced.generate(IDS, prompt_lookup_num_tokens=2),
        lambda: sliced.generate(IDS, assistant_model=llama()),
    ]
    return tokens_of(sharded), [error_of(call)[:2] for call in calls]


def test_a_tokenizer_is_for_generate_alone(pool):
    wanted = tokens_of(llama())
    assert len(wanted[0][0]) < 4 + 4 and wanted[1][0, 1] == WORDS.index("cd")
    words = (
        "Take sharded.generate_batch(",
        "token_healing=...) with dp",
        "prompt_lookup_num_tokens",
        "assistant_model",
    )
    for tokens, errors in pool.run(generating, world=2):
        for own, model in zip(tokens, wanted, strict=True):
            assert torch.equal(own, model)
        for (kind, text), word in zip(errors, words, strict=True):
            assert kind == "StateError" and word in text, text


def assisted(rank: int, world: int, group: Any) -> list[Tensor]:
    """Tokens drawn with drafts that are sharded over another group, over this one, and whole; and the next number."""
    model, meshes = llama(), [mesh_of(group), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))]
    main, draft = [autotp.compile(model, example_inputs=IDS, mesh=mesh, check_capture=False) for mesh in meshes]
    out: list[Tensor] = []
    for seed, target, drafts in ((7 + rank, main, (draft, main, model)), (7, model, [model] * 3)):
        torch.manual_seed(seed)
        out += [target.generate(IDS, assistant_model=x, do_sample=True, max_new_tokens=3) for x in drafts]
        out.append(torch.rand(1))
    return out


def test_a_draft_that_is_sharded_draws_as_on_one_device(pool):
    first, second = pool.run(assisted, world=2)
    for i in range(3):
        assert torch.equal(first[i], first[4 + i]) and torch.equal(second[i], first[4 + i])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    assert first[3] == first[7] != second[3]  # the other rank's own numbers go on as they were


def trained_after(rank: int, world: int, group: Any) -> list[float]:
    """How far weights are from one device's, after a step of an optimizer made after a use without gradients."""
    model, mesh = llama(2), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    examples = {"input_ids": IDS.repeat(2, 1), "labels": IDS.repeat(2, 1)}
    sharded: Any = autotp.compile(model, dp=2, mesh=mesh, example_inputs=examples, check_capture=False)
    alone, out = copy.deepcopy(model), []
    for use in (lambda: sharded.generate(IDS, max_new_tokens=2, do_sample=False), lambda: sharded.model(IDS)):
        with torch.no_grad():
            use()
        for module in (sharded, alone):
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            module(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        whole, wanted = sharded.full_state_dict(), alone.state_dict()
        out.append(max(float((whole[name] - x).abs().max()) for name, x in wanted.items()))
    return out


def test_an_optimizer_that_is_made_after_generating_over_dp_trains_all_weights(pool):
    for apart in pool.run(trained_after, world=2):
        assert max(apart) < 1e-5, apart


class Scored(nn.Module):
    """A language model within another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids, use_cache=False).logits


def test_a_part_has_no_continuous_batching():
    model = Scored(llama())
    sharded: Any = autotp.compile(model, 1, example_inputs=IDS, check_capture=False)
    for name in BATCHING:
        assert hasattr(model.inner, name) and not hasattr(sharded.inner, name)
        kind, text = error_of(lambda name=name: getattr(sharded.inner, name))[:2]
        assert kind == "AbsentError" and text.startswith(name) and "Take sharded.generate_batch(" in text
    assert "its class brings none" in error_of(lambda: sharded.generate_batch([[1]]))[1]
    assert not hasattr(sharded, "no_method")


def test_a_forward_that_is_given_one_is_refused_with_the_way_out():
    sharded: Any = autotp.compile(llama(), 1, example_inputs=IDS, check_capture=False)
    kind, text = error_of(lambda: sharded(IDS, tokenizer=tokenizer()))[:2]
    assert kind == "CaptureError" and "leave out what the forward itself does not read, such as a tokenizer" in text
