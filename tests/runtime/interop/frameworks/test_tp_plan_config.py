"""A config with `base_model_tp_plan` from a plan: transformers loads five architectures by it that ship none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

import autotp
from tests.helpers.processes.pool import Pool

CLOSE = 1e-5
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 32}
DECODER = SIZES | HEADS | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHORT = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# architecture -> fields of a small config, and modules that are split, of those that a layer has
WITHOUT: dict[str, tuple[dict[str, Any], set[str]]] = {
    "bert": (SIZES | HEADS, {"query", "key", "value", "dense"}),
    "gpt_bigcode": (SHORT, {"c_attn", "c_proj", "c_fc"}),
    "hunyuan_v1_dense": (
        DECODER | {"head_dim": 8, "num_key_value_heads": 4},
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
    "persimmon": (DECODER, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    "stablelm": (
        DECODER | {"num_key_value_heads": 4},
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
}


def small(kind: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    fields: dict[str, Any] = {**WITHOUT[kind][0], "use_cache": False}
    config = CONFIG_MAPPING[kind](**fields)
    assert config.base_model_tp_plan is None  # it ships none
    return AutoModel.from_config(config).eval(), torch.randint(3, 60, (2, 8))


def written(kind: str, folder: Path) -> torch.Tensor:
    """A folder of the base model, whose config has the plan; what the model gives."""
    model, ids = small(kind)
    plan = autotp.plan(model, 4, example_inputs={"input_ids": ids}, sequence_parallel=False, check_capture=False)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["base_model_tp_plan"] = dict(plan.to_tp_plan())
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(folder).base_model_tp_plan == plan.to_tp_plan()
    with torch.no_grad():
        return model(input_ids=ids)[0]


def loaded(rank: int, world: int, group: Any, folder: str) -> dict[str, tuple[torch.Tensor, set[str]]]:
    """By architecture: what a model gives that transformers loads by its config, and the modules that it split."""
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415  not in all versions

    logging.disable(logging.WARNING)
    found = {}
    for kind in WITHOUT:
        ids = small(kind)[1]
        config = DistributedConfig(tp_size=world, tp_plan="auto")
        model: Any = AutoModel.from_pretrained(f"{folder}/{kind}", distributed_config=config).eval()
        with torch.no_grad():
            out = model(input_ids=ids)[0]
        found[kind] = out, {
            n.split(".")[-2] for n, p in model.named_parameters()
            if isinstance(p, DTensor) and p.to_local().shape != p.shape and p.ndim == 2 and "embed" not in n
        }  # fmt: skip
    return found


def test_transformers_loads_by_the_config(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="an older transformers shards otherwise")
    pytest.importorskip("accelerate", reason="transformers asks for it to load with a plan")
    wanted = {kind: written(kind, tmp_path / kind) for kind in WITHOUT}
    for found in pool.run(loaded, str(tmp_path), world=4):
        for kind, (out, split) in found.items():
            assert float((out - wanted[kind]).abs().max() / wanted[kind].abs().max()) < CLOSE, kind
            assert WITHOUT[kind][1] <= split, (kind, split)
