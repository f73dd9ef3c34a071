"""The names of other programs: heads and base models, ties, merged experts, torch's own reader, buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertModel

import autotp
from autotp.errors import StateError
from tests.helpers.models import inputs_of, transformer
from tests.helpers.states import same


def compiled(model: nn.Module, tp: int = 2) -> Any:
    with torch.device("meta"):
        empty = type(model)(model.config).eval()  # type: ignore[call-arg]
    return autotp.compile(empty, tp, example_inputs=inputs_of(model))


def test_with_and_without_the_base_models_prefix(tmp_path):
    head: Any = transformer("bert", num_hidden_layers=1)
    head.save_pretrained(tmp_path / "head")
    head.bert.save_pretrained(tmp_path / "base")
    sharded = compiled(head)
    with pytest.raises(StateError, match="missing: cls.predictions"):
        sharded.load_checkpoint(tmp_path / "base")
    sharded.load_checkpoint(tmp_path / "head")
    with torch.no_grad():
        for p in sharded.bert.parameters():
            p.zero_()
    loaded = sharded.load_checkpoint(tmp_path / "base", strict=False)
    assert all(n.startswith("cls.") for n in loaded.missing_keys)
    assert all(n.startswith("pooler.") for n in loaded.unexpected_keys)
    same(sharded.full_state_dict(), head.state_dict())
    base = compiled(BertModel(head.config, add_pooling_layer=False).eval())
    with pytest.raises(StateError, match="unknown: model.safetensors: cls.predictions"):
        base.load_checkpoint(tmp_path / "head")
    assert all(n.startswith("pooler.") for n in base.load_checkpoint(tmp_path / "head", strict=False).missing_keys)
    found = base.full_state_dict() if not any(p.is_meta for p in base.parameters()) else dict(base.named_parameters())
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(base._shards.storages[name].full([found[name].detach()]), head.bert.state_dict()[name])


def test_what_is_written_is_what_transformers_writes(tmp_path):
    for name in ("llama-tied", "gpt2", "bert"):
        model: Any = transformer(name)
        model.save_pretrained(tmp_path / "theirs")
        sharded: Any = autotp.compile(model, 4, example_inputs=inputs_of(model))
        sharded.save_checkpoint(tmp_path / "ours", format="huggingface")
        ours, theirs = (load_file(tmp_path / p / "model.safetensors") for p in ("ours", "theirs"))
        same({n: ours[n] for n in sorted(ours)}, {n: theirs[n] for n in sorted(theirs)})
        again = type(model).from_pretrained(tmp_path / "ours")
        same(again.state_dict(), model.state_dict())


def test_experts_that_are_merged_while_loading(tmp_path):
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        empty = transformers.MixtralForCausalLM(config).eval()
    sharded: Any = autotp.compile(empty, 2, example_inputs={"input_ids": torch.randint(64, (2, 8))})
    sharded.load_checkpoint(tmp_path / "theirs", check_finite=True)
    same(sharded.full_state_dict(), model.state_dict())
    sharded.save_checkpoint(tmp_path / "ours", format="huggingface", max_file=20_000)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert any(".experts.3.w1" in n for n in theirs) and not any("gate_up" in n for n in theirs)
    ours = {n: t for f in (tmp_path / "ours").glob("*.safetensors") for n, t in load_file(f).items()}
    same({n: ours[n] for n in sorted(ours)}, {n: theirs[n] for n in sorted(theirs)})
    sharded.load_checkpoint(tmp_path / "ours")
    del theirs["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    save_file(theirs, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(StateError, match="gate_up_proj"):
        sharded.load_checkpoint(tmp_path / "theirs")
    same(type(model).from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


def test_torchs_own_reader_reads_what_is_saved(tmp_path):
    model: Any = transformer("phi3")
    sharded: Any = autotp.compile(model, 4, example_inputs=inputs_of(model))
    sharded.save_checkpoint(tmp_path / "dcp")
    found = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.state_dict_loader.load(found, checkpoint_id=str(tmp_path / "dcp"))
    same(found["model"], model.state_dict())


def test_what_torch_saved_is_read(tmp_path):
    model: Any = transformer("gpt2", n_layer=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, state in enumerate(
        ({"model": model, "optim": optimizer}, model.state_dict(), {"app": {"module": model.state_dict()}})
    ):
        with pytest.warns(UserWarning, match="single process"):
            dcp.state_dict_saver.save(state, checkpoint_id=str(tmp_path / str(i)))
        sharded = compiled(model)
        assert sharded.load_checkpoint(tmp_path / str(i)).unexpected_keys == []
        same(sharded.full_state_dict(), model.state_dict())


class Counting(nn.Module):
    """Buffers, one of which no state dict holds, a scalar, and an empty weight."""

    scale: Tensor
    calls: Tensor
    marks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.gain, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("calls", torch.tensor(7))
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("marks", torch.arange(16.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.up(x) * self.scale + self.marks + self.none.sum()


@pytest.mark.parametrize("format", ["dcp", "huggingface"])
def test_buffers_scalars_and_empty_weights(format, tmp_path: Path):
    torch.manual_seed(0)
    model = Counting()
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(2, 8))
    sharded.save_checkpoint(tmp_path / "a", format=format)
    with torch.no_grad():
        for t in (*sharded.parameters(), sharded.calls, sharded.scale):
            t.zero_()
    sharded.load_checkpoint(tmp_path / "a", check_finite=True)
    same(sharded.full_state_dict(), model.state_dict())
    sharded.load_checkpoint(model.state_dict() | {"marks": torch.zeros(16)})
    assert float(sharded.marks.sum()) == 0.0
