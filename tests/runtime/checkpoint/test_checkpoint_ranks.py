"""Checkpoints between real ranks: saved on two, loaded on one, three and four, with the optimizer, over dp, damaged."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from autotp.errors import AutoTPError
from autotp.runtime.checkpoint.digests import as_bytes
from autotp.runtime.checkpoint.folders import DIGESTS
from tests.helpers.compare import gradients_differ, mesh_of
from tests.helpers.models import inputs_of, transformer
from tests.helpers.modules.two_axes import Contrastive, model_of
from tests.helpers.states import same, stepped, with_momenta

SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
GROUPED = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven and tied": ("llama-uneven", {"tie_word_embeddings": True, "num_hidden_layers": 1, **SIX}),
    "fused": ("gpt2", {"n_layer": 1}),
    "fused of unequal heads": ("phi3", GROUPED),
}


@cache
def original(name: str) -> nn.Module:
    family, changed = MODELS[name]
    return transformer(family, **changed)


def compiled(model: nn.Module, tp: int, group: Any, meta: bool = False) -> Any:
    """The model sharded over a pool's group, its weights drawn afresh or not there at all."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        made = type(model)(model.config).eval()  # type: ignore[call-arg]
    return autotp.compile(made, tp, mesh=mesh, example_inputs=inputs_of(model))


def step(sharded: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    outputs = sharded(**inputs_of(sharded_config(sharded), seed=seed))
    outputs.logits.float().square().mean().backward()
    optimizer.step()


def sharded_config(sharded: Any) -> Any:
    return type("Like", (), {"config": sharded.config, "main_input_name": "input_ids"})


def adamw(sharded: Any) -> torch.optim.AdamW:
    some, others = [], []
    for name, p in sharded.named_parameters():
        (others if "norm" in name or "bias" in name else some).append(p)
    return torch.optim.AdamW(
        [{"params": some}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.8, 0.9), eps=1e-4
    )


def saved(rank: int, world: int, group: Any, name: str, folder: str) -> dict[str, Tensor]:
    """Load the original, train a step, save all of it; the state after one further step."""
    sharded = compiled(original(name), world, group, meta=True)
    sharded.load_checkpoint(Path(folder) / "original", check_finite=True)
    same(sharded.full_state_dict(), original(name).state_dict())
    optimizer = adamw(sharded)
    step(sharded, optimizer, 1)
    sharded.save_checkpoint(Path(folder) / "dcp", optimizer=optimizer, extra={"step": 1})
    sharded.save_checkpoint(Path(folder) / "hf", format="huggingface", max_file=60_000)
    step(sharded, optimizer, 2)
    return sharded.full_state_dict()


def resumed(rank: int, world: int, group: Any, name: str, folder: str) -> tuple[dict[str, Tensor], ...]:
    """Load what two ranks saved, and do the further step."""
    sharded = compiled(original(name), world, group)
    optimizer = adamw(sharded)
    step(sharded, optimizer, 3)  # moments of its own, which the checkpoint's replace
    optimizer.param_groups[0]["lr"] = 1.0
    loaded = sharded.load_checkpoint(Path(folder) / "dcp", optimizer=optimizer)
    assert loaded.extra == {"step": 1} and optimizer.param_groups[0]["lr"] == 1e-3
    now = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    sharded.load_checkpoint(Path(folder) / "hf")
    same(sharded.full_state_dict(), now)
    step(sharded, optimizer, 2)
    return now, sharded.full_state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_save_and_any_number_goes_on(name, pool, tmp_path):
    model: Any = original(name)
    model.save_pretrained(tmp_path / "original")
    wanted, other = pool.run(saved, name, str(tmp_path), world=2)
    same(other, wanted)
    again = type(model).from_pretrained(tmp_path / "hf").state_dict()
    for world in (1, 3, 4):
        now, found = pool.run(resumed, name, str(tmp_path), world=world)[0]
        same(again, now)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


def refused_on_one(rank: int, world: int, group: Any, folder: str) -> tuple[str, str]:
    """A NaN that only rank 1 reads, and a file that only rank 1 misses."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, world, mesh=mesh, example_inputs=torch.randn(2, 8))
    weights = {n: t + 1 for n, t in model.state_dict().items()}
    weights["0.weight"][15, 7] = torch.nan
    with pytest.raises(AutoTPError) as first:
        sharded.load_checkpoint(weights, check_finite=True)
    with pytest.raises(AutoTPError) as second:
        sharded.load_checkpoint(model.state_dict() if rank == 0 else Path(folder) / "nowhere")
    same(sharded.full_state_dict(), model.state_dict())
    return str(first.value), str(second.value)


def test_ranks_refuse_together(pool, tmp_path):
    for first, second in pool.run(refused_on_one, str(tmp_path), world=2):
        assert "0.weight holds NaN" in first and "there is no" in second


def over_two_axes(rank: int, world: int, group: Any, folder: str, meta: bool, split: bool) -> None:
    """dp beside tp: load, a step, save; then the same by other weights, and the file again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = original("fused")
    inputs = {k: t[:1] for k, t in inputs_of(model).items()}

    def make(meta: bool) -> Any:
        with torch.device("meta" if meta else "cpu"):
            made = type(model)(model.config).eval()  # type: ignore[call-arg]
        return autotp.compile(made, dp=2, fully_shard=split, mesh=mesh, example_inputs=inputs)

    sharded = make(meta)
    sharded.load_checkpoint(Path(folder) / "original")
    same(sharded.full_state_dict(), model.state_dict())
    optimizer = adamw(sharded)
    step(sharded, optimizer, 1)
    with torch.no_grad():
        sharded(**inputs)  # gathers what fully_shard splits
    saving = sharded.save_checkpoint(Path(folder) / "dcp", optimizer=optimizer, extra={"step": 1}, background=True)
    now = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    step(sharded, optimizer, 2)
    wanted = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    saving.result()
    sharded.load_checkpoint(Path(folder) / "dcp", optimizer=optimizer)
    sharded.save_checkpoint(Path(folder) / "hf", format="huggingface")
    same(sharded.full_state_dict(), now)
    step(sharded, optimizer, 2)
    same(sharded.full_state_dict(), wanted)


@pytest.mark.parametrize(("meta", "split"), [(True, False), (False, True), (True, True)])
def test_over_two_axes(meta, split, pool, tmp_path):
    model: Any = original("fused")
    model.save_pretrained(tmp_path / "original")
    pool.run(over_two_axes, str(tmp_path), meta, split, world=4)
    pool.run(resumed, "fused", str(tmp_path), world=1)


def scalar_on_meta(rank: int, world: int, group: Any) -> float:
    """The gradient of a scalar weight is the mean over dp, after its memory was made by loading it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, inputs = model_of("contrastive")
    mine = {k: v.chunk(2)[mesh["dp"].get_local_rank()] for k, v in inputs.items()}
    with torch.device("meta"):
        empty = Contrastive().double()
    sharded: Any = autotp.compile(empty, dp=2, mesh=mesh, example_inputs=mine)
    sharded.load_checkpoint(model.state_dict())
    sharded(**mine)[0].backward()
    model(**inputs)[0].backward()
    return gradients_differ(sharded, model)


def test_scalars_of_a_meta_model_are_averaged(pool):
    assert max(pool.run(scalar_on_meta, world=4)) < 1e-9


def flipped_on_ranks(rank: int, world: int, group: Any, folder: str) -> dict[str, tuple[str, str]]:
    """What each rank is told of bytes that rank 1 flips in what the two have saved."""
    sharded, optimizer = stepped(world, mesh=mesh_of(group))
    dcp, hf = Path(folder) / "dcp", Path(folder) / "huggingface"
    sharded.save_checkpoint(dcp, optimizer=optimizer, background=True).result()
    sharded.save_checkpoint(hf, format="huggingface")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    empty = autotp.compile(empty, world, mesh=mesh_of(group), example_inputs=torch.randn(2, 8))
    weight = sharded[0].weight
    own, momentum = weight.to_local().detach(), optimizer.state[weight]["momentum_buffer"].to_local()
    wanted, told = with_momenta(sharded, optimizer), {}

    def attempt(case: str, file: Path, data: Tensor, load: Any) -> None:
        content = file.read_bytes()
        at = content.index(bytes(as_bytes(data).tolist())) + 5
        dist.barrier(group)
        if rank == 1:
            file.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        dist.barrier(group)
        with pytest.raises(AutoTPError) as caught:
            load()
        told[case] = type(caught.value).__name__, str(caught.value)
        dist.barrier(group)
        if rank == 1:
            file.write_bytes(content)
        dist.barrier(group)

    shard = dcp / f"__{rank}_0.distcp"
    attempt("weight", shard, own, lambda: sharded.load_checkpoint(dcp))
    attempt("momentum", shard, momentum, lambda: sharded.load_checkpoint(dcp, optimizer=optimizer))
    attempt("finite", shard, own, lambda: sharded.load_checkpoint(dcp, check_finite=True))
    whole = sharded.full_state_dict()["2.weight"]
    attempt("huggingface", hf / "model.safetensors", whole, lambda: empty.load_checkpoint(hf))
    assert all(p.is_meta for p in empty.parameters())
    sharded.load_checkpoint(dcp, optimizer=optimizer)
    same(with_momenta(sharded, optimizer), wanted)
    empty.load_checkpoint(hf)
    same(empty.full_state_dict(), sharded.full_state_dict())
    return told


def test_all_ranks_are_told(pool, tmp_path):
    first, second = pool.run(flipped_on_ranks, str(tmp_path), world=2)
    for case in ("weight", "momentum", "finite"):
        (kind, text), (other, quoted) = second[case], first[case]
        assert (kind, other) == ("StateError", "RankError") and text in quoted  # rank 0 does not read that
        assert "__1_0.distcp is damaged: bytes " in text and f"delete {tmp_path / 'dcp' / DIGESTS}" in text
    assert "of model.0.weight, are not what was saved" in second["weight"][1]
    assert "The module may hold a part of it" in second["weight"][1]
    assert "of optimizer.state.0.weight.momentum_buffer" in second["momentum"][1]
    assert "The optimizer has the state that it had." in second["momentum"][1]
    assert "The module may hold" not in second["finite"][1]
    for kind, text in (first["huggingface"], second["huggingface"]):
        assert kind == "StateError" and "of 2.weight, are not what was saved" in text and "Nothing was loaded." in text
