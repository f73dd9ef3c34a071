"""The cache on disk: what a second process takes from it, what misses, and which files are never read."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import autotp
from autotp.cli.app import app
from autotp.driver import disk_cache, pipeline, source_key
from autotp.rules import register

X = torch.ones(4, 8)
SOURCE = """
import torch
from torch import nn
SCALE, OFFSETS = 2.0, [1.0, 2.0]

def helped(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mark = nn.Linear(8, width), nn.Linear(width, 8), torch.ones(8)

    def forward(self, input):
        return self.down(torch.relu(self.up(input))) * self.mark + helped(input) + OFFSETS[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.NAME, str(tmp_path / "cache"))
    monkeypatch.setattr(register, "USERS", set())  # rules that other tests registered
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "their_model.py"
    path.write_text(SOURCE)
    return path


def read(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("their_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch("sys.dont_write_bytecode", True):  # a second version within a second has the same time
        spec.loader.exec_module(module)
    return module


def plan(module: Any, width: int = 16, change: Any = None, **more: Any) -> tuple[Any, int]:
    """The plan, and how many captures it took."""
    model = module.Net(width)
    if change is not None:
        change(model)
    with (
        patch.object(pipeline, "prepare", side_effect=pipeline.prepare) as prepare,
        patch.dict("sys.modules", their_model=module),
    ):
        return autotp.plan(model, 2, example_inputs=X, check_capture=False, **more), prepare.call_count


def rank(folder: Path, file: Path, rank: int, results: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        model = read(file).Net(16)
        counted = patch.object(pipeline, "prepare", side_effect=pipeline.prepare)
        solved = patch("autotp.runtime.build.solve_plan", side_effect=pipeline.solve_plan)
        with counted as prepare, solved as solve, torch.no_grad():
            sharded = autotp.compile(model, 2, example_inputs=X, check_capture=False)
            error = (sharded(X[:3]) - model(X[:3])).abs().max().item()
        results.put((rank, prepare.call_count, solve.call_count, sharded.plan.to_json(), error))
        dist.barrier()
    except Exception as error:  # the test then fails by what is in it
        results.put((rank, repr(error)))
    os._exit(0)


def started(folder: Path, file: Path) -> list[Any]:
    """What two ranks in processes of their own tell."""
    context = multiprocessing.get_context("fork")
    folder.mkdir()
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(folder, file, i, results)) for i in range(2)]
    for each in ranks:
        each.start()
    found = sorted(results.get() for _ in ranks)
    for each in ranks:
        each.join()
    return found


@pytest.mark.ranks
def test_a_second_start_captures_and_solves_nothing(tmp_path: Path, file: Path, folder: Path):
    first, second = started(tmp_path / "first", file), started(tmp_path / "second", file)
    assert [x[1:3] for x in first] == [(1, 1), (0, 0)] and [x[1:3] for x in second] == [(0, 0), (0, 0)]
    assert {x[3] for x in (*first, *second)} == {first[0][3]}
    assert max(x[4] for x in second) < 1e-6
    assert all(stat.S_IMODE(os.stat(path).st_mode) & 0o77 == 0 for path in (folder, *folder.iterdir()))


def test_anything_that_differs_misses(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    module = read(file)
    own, times = plan(module)
    again, none = plan(module)
    assert (times, none) == (1, 0) and again == own
    assert again.explain("up.weight") == own.explain("up.weight")
    assert plan(module, memory="1GB")[1] == 0  # another plan of the same capture
    assert plan(module, width=32)[1] == 1
    assert plan(module, change=lambda m: setattr(m, "mark", 2 * torch.ones(8)))[1] == 1
    assert plan(module, random="torch")[1] == 1
    for name, value in {"SCALE": 3.0, "OFFSETS": [2.0, 2.0], "helped": lambda x: x - 1}.items():
        with patch.object(module, name, value):
            assert plan(module)[1] == 1, name
    file.write_text(SOURCE.replace("relu", "tanh"))
    assert plan(read(file))[1] == 1
    file.write_text(SOURCE)
    assert plan(read(file))[1] == 0
    with patch.object(source_key, "versions", lambda: ("torch 9",)):
        assert plan(module)[1] == 1
    monkeypatch.setattr(register, "USERS", {"theirs"})
    assert plan(module)[1] == 1
    monkeypatch.setenv(disk_cache.NAME, "0")
    assert plan(module)[1] == 1


def test_damaged_and_foreign_files_are_ignored(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    module = read(file)
    own, _ = plan(module)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    damages = {
        "it is damaged": lambda path: path.write_bytes(whole[path][:-1]),
        "holds another key": lambda path: path.write_bytes(next(x for p, x in whole.items() if p != path)),
        "in another format": lambda path: path.write_bytes(b"another"),
        "others can write to it": lambda path: path.chmod(0o622),
    }
    for why, damage in damages.items():
        for path in whole:
            damage(path)
        caplog.clear()
        assert plan(module) == (own, 1), why
        assert len([m for m in caplog.messages if why in m]) == 2
        for path in whole:
            path.chmod(0o600)
    assert plan(module)[1] == 0
    folder.chmod(0o777)
    assert plan(module)[1] == 1 and "others can write to it" in caplog.text
    folder.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert plan(module)[1] == 1 and "belongs to another user" in caplog.text


def test_a_size_and_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*words: str) -> str:
        return CliRunner().invoke(app, ["cache", *words]).stdout.replace("\n", "")

    kept = disk_cache.own_folder()
    assert kept is not None and "0 files" in run()
    monkeypatch.setattr(disk_cache, "MOST", 3000)
    for i in range(4):
        kept.write(f"key {i}", bytes(1000))
        os.utime(max(folder.iterdir(), key=lambda p: p.stat().st_mtime), (i, i))
    assert [kept.read(f"key {i}") is not None for i in range(4)] == [False, False, True, True]
    assert "2 files" in run() and "2 deleted" in run("--clear") and not list(folder.iterdir())
    monkeypatch.setenv(disk_cache.NAME, "off")
    assert "no cache" in run()
    monkeypatch.setenv(disk_cache.NAME, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert disk_cache.wish() == Path("/somewhere/autotp")
