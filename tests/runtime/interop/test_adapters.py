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
from autotp.errors import RankError
from autotp.runtime.interop.methods import whole_weights
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of, message_of

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
        sharded.save_pretrained(folder)
        refused = [
            error_of(lambda: sharded.merge_and_unload()),
            error_of(lambda: sharded.base_model.merge_and_unload()),
            error_of(lambda: sharded.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))),
            error_of(lambda: sharded.base_model.model.model.layers.append(torch.nn.Linear(2, 2))),
            error_of(lambda: sharded.base_model.model.save_pretrained(folder)),
        ]
        found = {"logits": sharded(input_ids=IDS).logits, "counts": sharded.get_nb_trainable_parameters()}
        return found | {"refused": refused, "adapter": sharded.active_adapters, "head": sharded.lm_head is not None}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_folder_of_adapters_is_read_by_peft_and_transformers(pool, tmp_path):
    base_model().save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapters"
    wanted = pool.run(saving, str(folder), world=2)
    assert {"adapter_config.json", "adapter_model.safetensors", "autotp.digests.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert not (folder / "model.safetensors").exists()
    names = load_file(folder / "adapter_model.safetensors")
    assert sum("lora_" in n for n in names) == 4 and sum("lm_head" in n for n in names) == 1, list(names)
    read = peft.PeftModel.from_pretrained(base_model(), folder)
    with torch.no_grad():
        for found in wanted:
            torch.testing.assert_close(read(input_ids=IDS).logits, found["logits"], rtol=1e-5, atol=1e-6)
            assert found["counts"] == adapted().get_nb_trainable_parameters()
            assert found["adapter"] == ["default"] and found["head"]
            words = (
                "merge_adapter()", "merge_adapter()", "the plan does not have", "no place in the plan",
                "sharded.save_pretrained",
            )  # fmt: skip
            for (error, text, _), word in zip(found["refused"], words, strict=True):
                assert error == "StateError" and word in text, text


CONFIGS: dict[str, Any] = {
    "LoRA": lambda on: peft.LoraConfig(r=4, target_modules=on, init_lora_weights=False),
    "DoRA": lambda on: peft.LoraConfig(r=4, target_modules=on, init_lora_weights=False, use_dora=True),
    "IA3": lambda on: peft.IA3Config(target_modules=on, feedforward_modules=on[-1:], init_ia3_weights=False),
    "OFT": lambda on: peft.OFTConfig(oft_block_size=4, r=0, target_modules=on, init_weights=False),
}
BATCH = {"input_ids": IDS, "labels": IDS}


def with_adapters(kind: str) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base_model().train(), CONFIGS[kind](["q_proj", "down_proj"]))


def living(rank: int, world: int, group: Any, kind: str, folder: str) -> dict[str, Any]:
    """What PEFT's own methods do to a sharded module, beside what they do to the model."""
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by peft (transformers 5.23)
    warnings.filterwarnings("ignore", "Unmerge result can be inaccurate")  # of IA3 by itself
    model = with_adapters(kind)
    sharded: Any = autotp.compile(model, example_inputs=BATCH, mesh=mesh_of(group))
    found: dict[str, Any] = {"counts": [m.get_nb_trainable_parameters() for m in (model, sharded)]}
    for m in (model, sharded):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-2)
        for _ in range(2):
            m(**BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = sharded.full_state_dict()
    found["trained"] = max(float((whole[n] - t).abs().max()) for n, t in model.state_dict().items())
    sharded.save_checkpoint(folder, format="huggingface")
    with torch.no_grad():
        found["loss"] = [float(m(**BATCH).loss) for m in (model, sharded)]
        with model.disable_adapter(), sharded.disable_adapter():
            found["disabled"] = [float(m(**BATCH).loss) for m in (model, sharded)]
        found["enabled"] = float(sharded(**BATCH).loss)
        before = down_proj(sharded.full_state_dict())
        sharded.merge_adapter()
        model.merge_adapter()
        weight, wanted = down_proj(sharded.full_state_dict()), down_proj(dict(model.named_parameters()))
        found["weight"], found["merged"] = float((weight - wanted).abs().max()), float(sharded(**BATCH).loss)
        found["moved"] = float((weight - before).abs().max())
        sharded.unmerge_adapter()
        found["unmerged"] = float(sharded(**BATCH).loss)
    return found


def down_proj(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(t.clone() for n, t in tensors.items() if n.endswith("down_proj.base_layer.weight"))


def check(found: dict[str, Any]) -> None:
    assert found["counts"][0] == found["counts"][1], found
    assert found["trained"] < 1e-5, found
    assert found["loss"][1] == pytest.approx(found["loss"][0], abs=1e-5)
    assert found["disabled"][1] == pytest.approx(found["disabled"][0], abs=1e-5)
    assert abs(found["disabled"][0] - found["loss"][0]) > 1e-4, "the adapters do nothing"
    assert found["enabled"] == found["loss"][1]
    for what in ("merged", "unmerged"):
        assert found[what] == pytest.approx(found["loss"][0], abs=1e-5), (what, found)
    assert found["weight"] < 1e-6 < 1e-4 < found["moved"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_trained_switched_and_merged_by_pefts_own_methods(pool, tmp_path):
    found: Any = None
    read: Any = None
    for kind in CONFIGS:
        for found in pool.run(living, kind, str(tmp_path / kind), world=2):
            check(found)
        read = peft.PeftModel.from_pretrained(base_model(), tmp_path / kind, is_trainable=True)
        assert float(read(**BATCH).loss.detach()) == pytest.approx(found["loss"][0], abs=1e-5), kind
        assert abs(float(with_adapters(kind)(**BATCH).loss.detach()) - found["loss"][0]) > 5e-5, "nothing was trained"
    resumed = autotp.compile(read, 1, example_inputs=BATCH)
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (with_adapters("OFT"), resumed)]
    assert trained[0] == trained[1]


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_checkpoint_of_a_training_is_read_with_its_adapters(tmp_path):
    example: Any = {"input_ids": IDS}
    sharded, other = (autotp.compile(adapted(), 1, example_inputs=example, check_capture=False) for _ in range(2))
    with torch.no_grad():
        for p in sharded.parameters():
            p.mul_(1.5)
    sharded.save_checkpoint(tmp_path / "training")
    other.load_checkpoint(tmp_path / "training")
    with torch.no_grad():
        assert torch.equal(sharded(**example).logits, other(**example).logits)


@pytest.mark.parametrize("lost", ["bias", ""])
def test_where_a_gather_fails_a_part_keeps_its_shards(lost):
    class Gathered:
        """Storage of a parameter that is whole on this rank, or of one whose ranks have parted."""

        def __init__(self, leaf: str) -> None:
            self.leaf = leaf

        def names(self, leaf: str) -> list[str]:
            return [leaf]

        def full(self, pieces: list[torch.Tensor]) -> torch.Tensor:
            if self.leaf == lost:
                raise RankError("The 2 tp ranks have parted")
            return pieces[0]

        def write(self, pieces: list[torch.Tensor], value: torch.Tensor) -> None:
            pieces[0].copy_(value)

    part: Any = torch.nn.Linear(4, 2)
    part._storages = {leaf: Gathered(leaf) for leaf in ("weight", "bias")}
    shards = part._parameters

    def merge() -> None:
        with whole_weights(part):
            part.weight.data.fill_(3.0)

    assert ("have parted" in message_of(merge)) is bool(lost)
    assert part._parameters is shards
    assert bool((part.weight == 3.0).all()) is (not lost)
