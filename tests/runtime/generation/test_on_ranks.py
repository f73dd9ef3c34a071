"""On ranks: what reaches the head, and what goes wrong while generating is an error in words on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel

import autotp
from autotp.errors import AutoTPError
from tests.helpers.compare import mesh_of
from tests.helpers.modules.carried import CARRIED, Attention, kept_bytes, tokens
from tests.helpers.processes.pool import WorkerError


def refused(call: Any) -> str:
    try:
        call()
    except AutoTPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Operators that multiply by a weight, and which of its dimensions are the columns: a step keeps `linear` as it is.
PRODUCTS = {torch.ops.aten.mm.default: -1, torch.ops.aten.bmm.default: -1, torch.ops.aten.linear.default: 0}


class HeadRows(TorchDispatchMode):
    """The rows of every product with a weight of this many rows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and args[1].shape[PRODUCTS[func]] == self.vocabulary:
            self.rows.append(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


class Ends:
    """Looks at every token, and ends this process at the third."""

    def __init__(self, here: bool) -> None:
        self.here, self.count = here, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        if self.here and self.count == 3:
            os._exit(1)
        return scores


def failing(rank: int, world: int, group: Any, folder: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    ids = torch.arange(4, 16).view(3, 4)
    found = [refused(lambda: autotp.compile(model, example_inputs=(ids, object()), mesh=mesh_of(group)))]
    sharded: Any = autotp.compile(model, example_inputs={"input_ids": ids}, mesh=mesh_of(group), check_capture=False)
    with torch.no_grad():
        mask = torch.ones_like(ids)
        with HeadRows(15) as head:  # of 30, on each of two ranks
            sharded(input_ids=ids)
            sharded.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3)
        found.append(str(head.rows))
        ends = [Ends(rank == 1)]
        found.append(
            refused(
                lambda: sharded.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, logits_processor=ends)
            )
        )
    Path(folder, str(rank)).write_text("\n\n".join(found))


@pytest.mark.ranks
def test_the_last_position_reaches_the_head_and_faults_are_named(pool, tmp_path):
    with pytest.raises(WorkerError, match="rank 1: crashed"):
        pool.run(failing, str(tmp_path), world=2)
    example, rows, ended = (tmp_path / "0").read_text().split("\n\n")
    assert "InputError: The input 'past_key_values'" in example and "Leave 'past_key_values' out" in example
    assert rows == "[12, 3, 3, 3]"  # of a plain call all, then of each of three prompts of four tokens the last
    assert ended.startswith("RankError") and "rank 1" in ended.lower()


def test_a_state_of_another_batch_is_named():
    model: Any = autotp.compile(Attention(), tp=1, example_inputs=(tokens(3),), carried=CARRIED, check_capture=False)
    with torch.no_grad():
        _, k, v = model(tokens(3))
        said = refused(lambda: model(tokens(1, batch=3), k, v))
    assert said.startswith("InputError: past_k holds 2 sequences (dimension 0) and the input") and "has 3" in said
    assert "begin a new one" in said


LATENT: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "intermediate_size": 32, "first_k_dense_replace": 1,
    "num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 32, "pad_token_id": 0,
}  # fmt: skip


def held(rank: int, world: int, group: Any) -> tuple[int, float, bool]:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)).eval()
    ids = torch.arange(4, 24).view(2, 10)
    options: dict[str, Any] = {"mesh": mesh_of(group), "objective": "decode", "check_capture": False}
    sharded: Any = autotp.compile(model, example_inputs={"input_ids": ids}, **options)
    dealt = sharded.plan.placements["model.layers.0.self_attn.kv_b_proj.weight"].sharded_dim == 0
    return kept_bytes(sharded, {"input_ids": ids}, 1), sharded.plan.memory.cache, dealt


def test_a_rank_holds_what_the_plan_counts(pool):
    """Of a latent all, though the heads that are made of it are dealt out."""
    size = 2 * 10 * (8 + 4) * 4  # sequences, tokens, numbers, bytes
    assert pool.run(held, world=2) == [(size, size, True)] * 2
