"""Outputs that stay split until they are read: what reads a rank's columns alone, and that all else is as before."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.comm import collectives
from autotp.runtime.deferred import Deferred, largest, place_of_largest
from tests.helpers.compare import mesh_of
from tests.helpers.errors import message_of

VOCABULARY = 31  # no number of ranks divides it


def rows() -> Tensor:
    """Rows with equal largest values, without a number, with nan in several places, and plain ones."""
    torch.manual_seed(0)
    x = torch.randn(8, VOCABULARY)
    x[0, [3, 12, 29]] = 9.0
    x[1] = -math.inf
    x[2, [14, 30]] = math.nan
    x[3, 30] = x[3, 15] = math.inf
    x[4, 20] = math.nan
    return x


def place_over(ranks: int, x: Tensor, backwards: bool = False) -> Tensor:
    """The argmax of what so many ranks have of the columns."""
    pairs, first = [], 0
    width = -(-x.shape[-1] // ranks)
    for rank in range(ranks):
        local = x[:, rank * width : (rank + 1) * width]
        pairs.append(largest(local, first))
        first += local.shape[-1]
    return place_of_largest(torch.stack(pairs[::-1] if backwards else pairs))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_largest_values_and_nan_are_found_where_torch_finds_them(ranks: int, dtype: torch.dtype):
    x = rows().to(dtype)
    assert place_over(ranks, x).tolist() == x.argmax(-1).tolist()
    assert place_over(3, x[:, :4]).tolist() == x[:, :4].argmax(-1).tolist()  # the last rank has none
    backwards = place_over(ranks, x, backwards=True) != x.argmax(-1)
    assert backwards.nonzero().flatten().tolist() == [0, 1, 2, 3]  # the rows that have several


READS = {
    "softmax": lambda x: x[:, -1].softmax(-1),
    "argmax of all": lambda x: x.argmax(),
    "argmax of rows": lambda x: x.argmax(1),
    "words": lambda x: x[:, -1, [3, 4]],
    "last dimension": lambda x: x[..., 2:5],
    "whole numbers": lambda x: x[:, -1].to(torch.int64).argmax(-1),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "list": lambda x: torch.tensor(x[:, -1].tolist()),
    "text": lambda x: torch.tensor(list(repr(x).encode())),
    "pieces": lambda x: x.split(2, 1)[0],
    "copy": lambda x: copy.deepcopy(x) * 2,
    "operator": lambda x: torch.ops.aten.mul.Tensor(x, 2),
    "narrow": lambda x: x.half().float() + x.bfloat16(),
    "written": lambda x: written(x),
}


def written(x: Any) -> Tensor:
    """A value after a view of it was written to, and what is read of it then."""
    last = x[:, -1]
    last[:, 7] = 100.0
    return torch.cat([x[:, -1], last.argmax(-1, keepdim=True), x[:, -1].argmax(-1, keepdim=True)], 1)


class Sent:
    """Counts what goes through collectives as (primitive, shape)."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()
        self._start = collectives._start

    def __call__(self, primitive: Any, x: Tensor, *rest: Any) -> Tensor:
        self.counts[primitive, tuple(x.shape)] += 1
        return self._start(primitive, x, *rest)

    def of(self, call: Any) -> tuple[Any, Counter[Any]]:
        """What a call gives, and what it sent."""
        self.counts.clear()
        with patch.object(collectives, "_start", self):
            return call(), Counter(self.counts)


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


def deferring(rank: int, world: int, group: Any) -> dict[str, Any]:
    model, batch = model_and_prompt()
    sharded: Any = autotp.compile(model, example_inputs=batch, mesh=mesh_of(group), check_capture=False)
    found: dict[str, Any] = {"wrong": []}
    sent = Sent()
    with torch.no_grad():
        options: dict[str, Any] = {"max_new_tokens": 5, "return_dict_in_generate": True}
        for name, more in {
            "greedy": {}, "sampled": {"do_sample": True}, "scores": {"output_scores": True},
            "own": {"logits_processor": [lambda ids, scores: scores]},
        }.items():  # fmt: skip
            torch.manual_seed(1)
            wanted = model.generate(**batch, **options, **more)
            torch.manual_seed(1)
            got, found[name] = sent.of(lambda more=more: sharded.generate(**batch, **options, **more))
            pairs = zip([got.sequences, *(got.scores or ())], [wanted.sequences, *(wanted.scores or ())], strict=True)
            for a, b in pairs:
                same = type(a) is Tensor and torch.allclose(a, b, atol=1e-5)
                found["wrong"] += [] if same else [f"generate: {name}"]

        call = {**batch, "use_cache": True}
        plain, found["plain"] = sent.of(lambda: sharded(**call).logits)
        found["type"] = type(plain).__name__
        for name, read in READS.items():
            late = sharded._call("", (), call, late=True).logits
            assert type(late) is Deferred and (late.shape, late.dtype) == (plain.shape, plain.dtype)
            expected = read(plain.clone())
            if not torch.equal(read(late), expected):
                found["wrong"].append(name)
        late = sharded._call("", (), call, late=True).logits.to(torch.float64)
        _, found["wire"] = sent.of(lambda: (late + 1, late + 1))
        late = sharded._call("", (), call, late=True).logits
        found["parted"] = message_of(lambda: late.argmax(-1) if rank else late * 2)
    return found


@pytest.mark.ranks
def test_greedy_decoding_gathers_no_vocabulary_and_every_other_reader_sees_the_whole(pool):
    for found in pool.run(deferring, world=3):
        assert found["wrong"] == [] and found["type"] == "Tensor"
        pairs, words = ("all_gather", (2, 2)), ("all_gather", (2, 11))
        steps = {name: (found[name][pairs], found[name][words]) for name in ("greedy", "sampled", "own")}
        assert steps == {"greedy": (5, 0), "sampled": (0, 5), "own": (0, 0)}
        assert found["own"]["all_gather", (2, 1, 11)] == 5  # at once, for what one rank alone may read
        assert (found["scores"][pairs], found["scores"][words]) == (5, 5)
        assert found["plain"]["all_gather", (2, 4, 11)] == 1
        assert found["wire"] == {("all_gather", (2, 4, 44)): 1}  # once, in the bytes of float32
        assert "ranks have parted" in found["parted"] and "argmax of an output" in found["parted"]


def on_slices(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Greedy decoding over dp x tp in half precision, beside the model's own, and what it sent."""
    model, whole = model_and_prompt(VOCABULARY + 1)
    model.bfloat16()
    own = slice(rank // 2, rank // 2 + 1)  # of the batch, one sequence for each dp rank
    batch = {name: x[own] for name, x in whole.items()}
    sharded: Any = autotp.compile(model, 2, dp=2, example_inputs=batch, check_capture=False)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        tokens, sent = Sent().of(lambda: sharded.generate(**batch, **options))
        return {"tokens": tokens.tolist(), "own": model.generate(**batch, **options).tolist(), "sent": sent}


@pytest.mark.ranks
def test_greedy_decoding_of_slices_of_a_batch_in_half_precision(pool):
    results = pool.run(on_slices, world=4)
    assert [found["tokens"] for found in results] == [found["own"] for found in results]
    assert results[0]["own"] != results[2]["own"]  # the dp ranks have sequences of their own
    for found in results:
        assert {call[1]: n for call, n in found["sent"].items() if call[0] == "all_gather"} == {(1, 2): 3}
