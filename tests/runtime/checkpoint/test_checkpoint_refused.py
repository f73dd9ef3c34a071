"""What a checkpoint can be wrong in: found, named, and nothing loaded."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autotp
from autotp.errors import InputError, StateError
from autotp.runtime.checkpoint.loading import _finite


class Small(nn.Module):
    """Two layers, a norm with buffers, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.again = nn.Linear(8, 16, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.down(torch.relu(self.norm(self.up(x)))))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return Small().eval()


@pytest.fixture
def sharded(model: nn.Module) -> Any:
    return autotp.compile(model, 2, example_inputs=torch.randn(3, 8))


@pytest.fixture
def weights(model: nn.Module) -> dict[str, Tensor]:
    """What is stored; other numbers than the model's, and the tied weight once."""
    return {n: t + 1 for n, t in model.state_dict().items() if n != "again.weight"}


def refused(sharded: Any, path: Any, *texts: str, **options: Any) -> str:
    """The error of loading this, after which the module holds what it held."""
    before = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    with pytest.raises(StateError) as caught:
        sharded.load_checkpoint(path, **options)
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))
    for name, value in sharded.full_state_dict().items():
        assert torch.equal(value, before[name]), name
    return str(caught.value)


def holds(sharded: Any, weights: dict[str, Tensor]) -> None:
    found = sharded.full_state_dict()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


def test_one_file_a_folder_a_dict_and_tied_names(sharded, weights, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    for source in (tmp_path / "model.safetensors", tmp_path, str(tmp_path), weights):
        with torch.no_grad():
            for p in sharded.parameters():
                p.zero_()
        assert sharded.load_checkpoint(source, check_finite=True).missing_keys == []
        holds(sharded, weights | {"again.weight": weights["up.weight"]})
    tied = weights["up.weight"].clone()
    both = {**weights, "again.weight": tied}
    del weights["up.weight"]
    for stored in (weights | {"again.weight": tied}, both):
        save_file(stored, tmp_path / "model.safetensors")
        sharded.load_checkpoint(tmp_path)
        assert torch.equal(sharded.full_state_dict()["up.weight"], tied)
    save_file(both | {"again.weight": tied + 1}, tmp_path / "model.safetensors")
    refused(sharded, tmp_path, "up.weight and again.weight differ")


def test_everything_that_does_not_fit_is_listed(sharded, weights, tmp_path):
    del weights["up.bias"], weights["norm.running_mean"]
    weights |= {"down.weight": torch.zeros(8, 17), "down.bias": torch.zeros(8, dtype=torch.float16)}
    weights |= {"other": torch.zeros(1), "more": torch.zeros(1)}
    save_file(weights, tmp_path / "model.safetensors")
    refused(
        sharded, tmp_path, "missing: up.bias", "missing: norm.running_mean", "unknown: model.safetensors: other",
        "unknown: model.safetensors: more", "model.safetensors: down.weight is [8, 17], the model has [8, 16]",
        "model.safetensors: down.bias is float16, the model has float32", "nothing was loaded",
    )  # fmt: skip
    refused(sharded, tmp_path, "down.weight", strict=False)
    weights["down.weight"] = torch.ones(8, 16)
    save_file(weights, tmp_path / "model.safetensors")
    refused(sharded, tmp_path, "down.bias is float16", strict=False)
    loaded = sharded.load_checkpoint(tmp_path, strict=False, cast=True)
    assert loaded.missing_keys == ["up.bias", "norm.running_mean"] and set(loaded.unexpected_keys) == {"other", "more"}
    assert torch.equal(sharded.full_state_dict()["down.weight"], torch.ones(8, 16))
    assert sharded.full_state_dict()["down.bias"].dtype == torch.float32


def test_infinities_where_asked(sharded, weights, tmp_path):
    weights["down.weight"][7, 15] = float("nan")
    weights["norm.bias"][0] = float("inf")
    save_file(weights, tmp_path / "model.safetensors")
    refused(sharded, tmp_path, "down.weight holds NaN", "norm.bias holds NaN", check_finite=True)
    sharded.load_checkpoint(tmp_path)
    assert sharded.full_state_dict()["down.weight"].isnan().sum() == 1


def header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def longer(table: dict[str, Any]) -> None:
    table["up.weight"]["shape"][0] += 1


def overlapping(table: dict[str, Any]) -> None:
    table["up.weight"]["data_offsets"] = table["norm.weight"]["data_offsets"]
    table["up.weight"]["shape"] = [16]


def beyond(table: dict[str, Any]) -> None:
    start, stop = table["up.weight"]["data_offsets"]
    table["up.weight"]["data_offsets"] = [start + 10**9, stop + 10**9]


def negative(table: dict[str, Any]) -> None:
    table["up.weight"]["shape"] = [-8, -16]


def no_shape(table: dict[str, Any]) -> None:
    del table["up.weight"]["shape"]


@pytest.mark.parametrize("change", [longer, overlapping, beyond, negative, no_shape])
def test_headers_that_lie(sharded, weights, tmp_path, change):
    save_file(weights, tmp_path / "model.safetensors")
    header(tmp_path / "model.safetensors", change)
    refused(sharded, tmp_path, "model.safetensors: the header cannot be read", "nothing was", "save them again")


def test_files_that_are_cut_off(sharded, weights, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    whole = file.read_bytes()
    damaged = "model.safetensors: the header cannot be read"
    for length in (len(whole) - 1, 0, 7, 8, 40, 200):
        file.write_bytes(whole[:length])
        refused(sharded, tmp_path, damaged)
    file.write_bytes(whole + b"0000")
    refused(sharded, tmp_path, damaged)
    twice = whole[8 : 8 + int.from_bytes(whole[:8], "little")].replace(b'"up.bias"', b'"down.bias"')
    file.write_bytes(len(twice).to_bytes(8, "little") + twice + whole[8 + int.from_bytes(whole[:8], "little") :])
    refused(sharded, tmp_path, damaged)
    file.write_bytes(whole)
    sharded.load_checkpoint(tmp_path)


def indexed(folder: Path, weights: dict[str, Tensor], **changed: str) -> None:
    """Two files and an index."""
    names = list(weights)
    files = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, own in files.items():
        save_file({n: weights[n] for n in own}, folder / file)
    weight_map = {n: file for file, own in files.items() for n in own} | changed
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index(sharded, weights, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    indexed(folder, weights)
    sharded.load_checkpoint(folder)
    holds(sharded, weights)
    shutil.copy(folder / "a.safetensors", tmp_path)
    for outside in ("../a.safetensors", str(tmp_path / "a.safetensors"), "x/../../a.safetensors"):
        indexed(folder, weights, **{"up.weight": outside})
        refused(sharded, folder, "model.safetensors.index.json: up.weight is outside of the folder", outside)
    indexed(folder, weights, **{"up.weight": "b.safetensors"})
    refused(sharded, folder, "b.safetensors: does not hold up.weight")
    indexed(folder, weights, **{"up.weight": "c.safetensors"})
    refused(sharded, folder, "c.safetensors")
    indexed(folder, weights)
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(sharded, folder, "no index of tensors")
    (folder / "model.safetensors.index.json").unlink()
    refused(sharded, folder, "2 safetensors files and 0 indices")


def test_what_is_no_checkpoint(sharded, weights, tmp_path):
    refused(sharded, tmp_path / "nowhere", "there is no")
    refused(sharded, tmp_path, "no checkpoint")
    refused(sharded, 3, "int")
    refused(sharded, weights | {"up.bias": 3}, "up.bias")
    with pytest.raises(InputError, match="zip"):
        sharded.save_checkpoint(tmp_path / "a", format="zip")
    with pytest.raises(InputError, match="holds the model alone"):
        sharded.save_checkpoint(tmp_path / "a", format="huggingface", extra={"step": 1})
    with pytest.raises(StateError, match="JSON"):
        sharded.save_checkpoint(tmp_path / "a", extra={"step": {1, 2}})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="no checkpoint, and saving would replace"):
        sharded.save_checkpoint(tmp_path)
    with pytest.raises(StateError, match="a file"):
        sharded.save_checkpoint(tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


class Bomb:
    """A pickle that runs code when it is opened."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("opened"),)


def test_pickles_are_not_opened(sharded, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        refused(sharded, source, "pytorch_model.bin", "trusted=True")
        sharded.load_checkpoint(source, trusted=True)
        holds(sharded, weights)
    torch.save({**weights, "up.bias": Bomb()}, tmp_path / "pytorch_model.bin")
    refused(sharded, tmp_path, "pytorch_model.bin", trusted=True)
    sharded.save_checkpoint(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    refused(sharded, tmp_path / "dcp", ".metadata is not what was saved")
    (tmp_path / "dcp" / "autotp.digests.json").unlink()
    for trusted in (False, True):
        refused(sharded, tmp_path / "dcp", ".metadata", "touch", trusted=trusted)
    assert not (tmp_path / "opened").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "opened").exists()


def test_a_damaged_dcp_folder(sharded, tmp_path):
    sharded.save_checkpoint(tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    refused(sharded, tmp_path / "dcp", file.name, "model.", "cut off")
    file.write_bytes(whole[: len(whole) // 2])
    assert refused(sharded, tmp_path / "dcp", file.name).count("cut off") > 1
    file.unlink()
    refused(sharded, tmp_path / "dcp", file.name, "is not there")
    file.write_bytes(whole)
    table = tmp_path / "dcp" / ".metadata"
    kept = table.read_bytes()
    table.write_bytes(kept[:-1])
    refused(sharded, tmp_path / "dcp", ".metadata is not what was saved")
    (tmp_path / "dcp" / "autotp.digests.json").unlink()
    for length in (0, 10, len(kept) - 1):
        table.write_bytes(kept[:length])
        refused(sharded, tmp_path / "dcp", ".metadata cannot be read")
    table.write_bytes(kept.replace(file.name.encode(), b"../0_.distcp"))
    refused(sharded, tmp_path / "dcp", "outside of the folder")


def test_an_optimizer_that_is_not_the_same(sharded, tmp_path):
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    sharded.save_checkpoint(tmp_path / "without")
    refused(sharded, tmp_path / "without", "holds no optimizer", optimizer=optimizer)
    sharded.save_checkpoint(tmp_path / "with", optimizer=optimizer)
    other = torch.optim.SGD(list(sharded.parameters())[1:], lr=0.1)
    refused(sharded, tmp_path / "with", "groups", optimizer=other)
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    refused(sharded, tmp_path / "with", "not this module's parameters", optimizer=strange)
    with pytest.raises(StateError, match="not this module's parameters"):
        sharded.save_checkpoint(tmp_path / "with", optimizer=strange)
    with torch.device("meta"):
        empty = Small().eval()
    early: Any = autotp.compile(empty, 2, example_inputs=torch.randn(3, 8))
    with pytest.raises(StateError, match="make the optimizer, then load both"):
        early.load_checkpoint(tmp_path / "with", optimizer=torch.optim.SGD(early.parameters(), lr=0.1))
    with pytest.raises(StateError, match="meta device"):
        early.save_checkpoint(tmp_path / "early")
    early.load_checkpoint(tmp_path / "with", optimizer=None)
    again = torch.optim.SGD(early.parameters(), lr=0.5, momentum=0.9)
    early.load_checkpoint(tmp_path / "with", optimizer=again)
    assert again.param_groups[0]["lr"] == 0.1


def test_eight_bit_numbers_are_checked():
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64):
        assert _finite(torch.ones(3).to(dtype))
    assert not _finite(torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn))
