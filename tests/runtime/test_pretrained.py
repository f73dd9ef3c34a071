"""`autotp.from_pretrained`: folders of transformers, read by slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.errors import AutoTPError, InputError, RankError, StateError
from tests.helpers.models import DECODER, redrawn

SMALL: dict[str, Any] = DECODER | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model: Any = redrawn(LlamaForCausalLM(LlamaConfig(**SMALL)))
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=5)
    model.save_pretrained(path)
    return path


def on_ranks(rank: int, world: int, group: Any, folder: Path) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    seen: list[bool] = []

    def prepare(model: Any) -> None:
        seen.append(all(p.is_meta for p in model.parameters()))
        model.requires_grad_(False)

    sharded: Any = autotp.from_pretrained(folder, mesh=mesh, prepare=prepare, check_capture=False)
    ids = torch.arange(12).view(2, 6)
    original = LlamaForCausalLM.from_pretrained(folder).requires_grad_(False)
    half = autotp.from_pretrained(folder, mesh=mesh, dtype=torch.bfloat16, check_capture=False)
    faults = {}
    for name in (folder / "nothing", folder / f"only {rank}"):
        try:
            autotp.from_pretrained(name, mesh=mesh)
        except AutoTPError as error:
            faults[name.name[:4]] = f"{type(error).__name__}: {error}"
    return {
        "on meta": seen,
        "mode": sharded.training,
        "off": float((sharded(input_ids=ids).logits - original(input_ids=ids).logits).abs().max()),
        "held": sum(p.to_local().numel() for p in sharded.parameters()),
        "whole": sum(p.numel() for p in original.parameters()),
        "frozen": not any(p.requires_grad for p in sharded.parameters()),
        "generation": (sharded.generation_config.max_new_tokens, sharded.generation_config.eos_token_id),
        "dtypes": {str(p.dtype) for p in half.parameters()},
        "faults": faults,
    }


@pytest.mark.ranks
def test_every_rank_reads_its_slices(pool, folder):
    for only in ("only 0",):  # a folder that one rank alone can use
        (folder / only).mkdir()
        (folder / only / "config.json").write_text((folder / "config.json").read_text())
    for found in pool.run(on_ranks, folder, world=2):
        assert found["on meta"] == [True] and found["frozen"] and not found["mode"]
        assert found["off"] < 1e-5 and found["generation"] == (7, 5)
        assert found["held"] < 0.55 * found["whole"] and found["dtypes"] == {"torch.bfloat16"}
        assert found["faults"]["noth"].startswith("InputError") and "nothing is downloaded" in found["faults"]["noth"]
        assert "only 1 is no folder" in found["faults"]["only"]


def test_what_cannot_be_used_is_named(folder, tmp_path):
    with pytest.raises(InputError, match=r"is no folder.*nothing is downloaded"):
        autotp.from_pretrained("meta-llama/Llama-3.1-8B", 1)
    with pytest.raises(InputError, match=r"holds no config\.json"):
        autotp.from_pretrained(tmp_path, 1)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        autotp.from_pretrained(folder, 2)
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StateError, match="no checkpoint that can be read"):
        autotp.from_pretrained(tmp_path, 1, check_capture=False)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"intermediate_size": 56}))
    with pytest.raises(StateError, match="mlp"):
        autotp.from_pretrained(tmp_path, 1, check_capture=False)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"model_type": "nosuch"}))
    with pytest.raises(InputError, match="cannot build it"):
        autotp.from_pretrained(tmp_path, 1)
    assert issubclass(RankError, AutoTPError)
