"""Adapters of PEFT: what a sharded module saves for transformers is read there without a missing tensor."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import autotp
from tests.helpers.compare import mesh_of

IDS = torch.arange(12).view(2, 6)


def base_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def adapted() -> Any:
    """LoRA on a column-parallel and a row-parallel layer, and a head that is trained whole."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(base_model(), config)


def saving(rank: int, world: int, group: Any, folder: str) -> Any:
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by peft (transformers 5.23)
    sharded: Any = autotp.compile(adapted(), example_inputs={"input_ids": IDS}, mesh=mesh_of(group))
    with torch.no_grad():
        for name, p in sharded.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                p.mul_(1.5)  # as training would
        sharded.save_checkpoint(folder, format="huggingface")
        return sharded(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_folder_of_adapters_is_read_by_peft_and_transformers(pool, tmp_path):
    base_model().save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapters"
    wanted = pool.run(saving, str(folder), world=2)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()
    names = load_file(folder / "adapter_model.safetensors")
    assert sum("lora_" in n for n in names) == 4 and sum("lm_head" in n for n in names) == 1, list(names)
    read = peft.PeftModel.from_pretrained(base_model(), folder)
    with torch.no_grad():
        for logits in wanted:
            torch.testing.assert_close(read(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-6)


def test_a_config_is_written_beside_names_of_transformers_alone(tmp_path):
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = base_model()
            self.config = self.inner.config

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids).logits

    for model, given, there in ((Wrapper(), IDS, False), (base_model(), {"input_ids": IDS}, True)):
        folder = Path(tmp_path / type(model).__name__)
        autotp.compile(model, 1, example_inputs=given).save_checkpoint(folder, format="huggingface")
        assert (folder / "config.json").exists() is there
