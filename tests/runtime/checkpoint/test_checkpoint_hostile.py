"""Checkpoints that mean harm: pipes, nesting, tables of other things. One error, which names the file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import autotp
from autotp.errors import StateError

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def sharded() -> Any:
    torch.manual_seed(0)
    return autotp.compile(nn.Linear(4, 8), 2, example_inputs=torch.randn(3, 4))


@pytest.fixture
def saved(sharded: Any, tmp_path: Path) -> Path:
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for p in sharded.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    sharded.save_checkpoint(tmp_path / "dcp", optimizer=optimizer)
    (tmp_path / "dcp" / "autotp.digests.json").unlink()  # who means harm writes others
    return tmp_path / "dcp"


def refused(sharded: Any, path: Path, *said: str, **options: Any) -> None:
    with pytest.raises(StateError) as caught:
        sharded.load_checkpoint(path, **options)
    assert all(text in str(caught.value) for text in said), str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", ".metadata", "weights.bin"])
def test_a_pipe_is_not_waited_for(sharded, tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(sharded, tmp_path, name, "pipe or device", trusted=True)


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def test_what_is_nested_too_deep(sharded, saved, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(header('{"weight": ' + DEEP + "}"))
    refused(sharded, tmp_path / "model.safetensors", "model.safetensors", "the header cannot be read")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(DEEP)
    refused(sharded, folder, "model.safetensors.index.json", "nested too deep")
    (saved / "autotp.json").write_text(DEEP)
    refused(sharded, saved, "autotp.json", "nested too deep")


@pytest.mark.parametrize("content", ["5", "[]", "null", '"text"', '{"extra": 5}', '{"extra": [1]}'])
def test_notes_that_are_not_ours(sharded, saved, content):
    (saved / "autotp.json").write_text(content)
    refused(sharded, saved, "autotp.json", "Take it away, or save again")


def test_notes_that_are_no_text(sharded, saved):
    (saved / "autotp.json").write_bytes(b"\xff\xfe")
    refused(sharded, saved, "autotp.json", "is not text in UTF-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: 5,
        lambda optimizer: {"groups": 5},
        lambda optimizer: {**optimizer, "groups": [5]},
        lambda optimizer: {**optimizer, "numbers": 5},
        lambda optimizer: {**optimizer, "elements": {"weight": 5}},
        lambda optimizer: {**optimizer, "numbers": {"weight": {"step": {"value": 1.0, "dtype": "load"}}}},
    ],
)
def test_notes_of_another_optimizer(sharded, saved, change):
    notes = json.loads((saved / "autotp.json").read_text())
    notes["optimizer"] = change(notes["optimizer"])
    (saved / "autotp.json").write_text(json.dumps(notes))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    refused(sharded, saved, "optimizer was changed or damaged", "save again", optimizer=optimizer)


def table_of(change: Callable[[Metadata], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        table = pickle.loads((folder / ".metadata").read_bytes())
        change(table)
        (folder / ".metadata").write_bytes(pickle.dumps(table))

    return write


def first(table: Any) -> Any:
    return table.state_dict_metadata["model.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.state_dict_metadata.update(other=5),
        lambda t: t.__dict__.update(state_dict_metadata=5),
        lambda t: t.__dict__.update(storage_data=[]),
        lambda t: t.storage_data.update(dict.fromkeys(t.storage_data, 5)),
        lambda t: [x.__dict__.update(relative_path=5) for x in t.storage_data.values()],
        lambda t: [x.__dict__.update(offset=-1) for x in t.storage_data.values()],
        lambda t: [x.__dict__.update(length="all") for x in t.storage_data.values()],
        lambda t: first(t).__dict__.update(size=[4, 8]),
        lambda t: first(t).__dict__.update(size=torch.Size((4, 8, 2))),
        lambda t: first(t).__dict__.update(chunks=5),
        lambda t: first(t).__dict__.update(chunks=[torch.Size((1,))]),
        lambda t: first(t).chunks[0].__dict__.update(offsets=torch.Size((100, 0))),
        lambda t: first(t).properties.__dict__.update(dtype="float32"),
        lambda t: first(t).__dict__.update(properties=None),
    ],
)
def test_tables_of_other_things(sharded, saved, change):
    table_of(change)(saved)
    refused(sharded, saved, ".metadata is no table of tensors", "Save the checkpoint again")


def test_a_table_that_asks_for_what_it_needs_oddly(sharded, saved):
    """`torch.Size` of a list of modules, a class in the place of an object, and the table's own class."""
    for what in (torch.Size, Metadata, [torch.Size] * 3):
        (saved / ".metadata").write_bytes(pickle.dumps(what))
        refused(sharded, saved, ".metadata")


def test_a_sound_one_is_read(sharded, saved, tmp_path):
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.2, momentum=0.9)
    sharded.load_checkpoint(saved, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    save_file({n: t + 1 for n, t in sharded.full_state_dict().items()}, tmp_path / "model.safetensors")
    sharded.load_checkpoint(tmp_path / "model.safetensors")
