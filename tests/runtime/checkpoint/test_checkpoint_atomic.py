"""A save that is cut off anywhere leaves the previous checkpoint whole: killed, or failing, at every step of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.errors import AutoTPError, StateError
from autotp.runtime.checkpoint import folders, wholes

WRITES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
    "shutil.copyfile",
}
FORMATS = ["dcp", "huggingface"]


class Steps:
    """Counts what a save does to the disk, and at one of these steps does something else."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.seen, self.on = at, act, 0, False

    def step(self) -> None:
        if self.on:
            self.seen += 1
            if self.seen == self.at:
                self.act()

    def audit(self, event: str, args: Any) -> None:
        if event in WRITES or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
            self.step()

    @contextlib.contextmanager
    def watch(self, exchange: bool) -> Iterator[None]:
        """Count from here on; without `exchange` the file system cannot swap two folders."""
        real_sync, real_save, real_exchange = os.fsync, wholes.save_file, folders._exchange

        def sync(descriptor: int) -> None:
            self.step()
            real_sync(descriptor)

        def save(tensors: Any, file: Path, metadata: Any) -> None:
            real_save(tensors, file, metadata)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])  # half of it, for whom the next step is the last
            self.step()
            file.write_bytes(whole)

        def swap(one: Path, other: Path) -> bool:
            self.step()
            done = exchange and real_exchange(one, other)
            self.step()
            return done

        with (
            patch.object(os, "fsync", sync),
            patch.object(wholes, "save_file", save),
            patch.object(folders, "_exchange", swap),
        ):
            self.on = True
            try:
                yield
            finally:
                self.on = False


def module() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return autotp.compile(model, 1, example_inputs=torch.randn(2, 8))


def fill(sharded: Any, value: float) -> None:
    with torch.no_grad():
        for p in sharded.parameters():
            p.fill_(value)


def held(sharded: Any, path: Path) -> float:
    """The one value that all of the checkpoint has."""
    fill(sharded, -1.0)
    sharded.load_checkpoint(path)
    values = {float(v) for t in sharded.full_state_dict().values() for v in t.unique()}
    assert len(values) == 1, values
    return values.pop()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(sharded: Any, path: Path, format: str, exchange: bool, at: int) -> bool:
    """Whether a process that saves 2.0 was killed at this step; else it came to the end."""
    child = os.fork()
    if child == 0:
        steps = Steps(at, kill)
        sys.addaudithook(steps.audit)
        fill(sharded, 2.0)
        with steps.watch(exchange):
            sharded.save_checkpoint(path, format=format)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kills(folder: str) -> None:
    """Kill a save at every step, and look at the folder after each. Run in a process without threads."""
    sharded, counts = module(), []
    for format, exchange in zip(FORMATS, (True, False), strict=True):
        path = Path(folder) / format
        found = []
        fill(sharded, 1.0)
        sharded.save_checkpoint(path, format=format)
        (path / "tokenizer.json").write_text("{}")
        for at in range(1, 1000):
            if not killed_at(sharded, path, format, exchange, at):
                break
            assert path.exists() or not exchange
            found.append(held(sharded, path))
            fill(sharded, 1.0)
            sharded.save_checkpoint(path, format=format)  # what was left does not disturb the next
            assert held(sharded, path) == 1.0 and (path / "tokenizer.json").exists()
            assert sorted(p.name for p in Path(folder).iterdir() if p.name.startswith(".")) == []
        assert held(sharded, path) == 2.0
        assert found == sorted(found) and set(found) == {1.0, 2.0}, found  # whole, then new, in one step
        counts.append(len(found))
    print(counts)
    assert min(counts) > 12


@pytest.mark.ranks
def test_killed_at_every_step(tmp_path):
    code = f"from tests.runtime.checkpoint.test_checkpoint_atomic import kills; kills({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)


def full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("format", FORMATS)
def test_failing_at_every_step(format, tmp_path):
    sharded, path = module(), tmp_path / "checkpoint"
    steps = Steps(0, full)
    sys.addaudithook(steps.audit)  # for good: it does nothing once `on` is false
    fill(sharded, 1.0)
    sharded.save_checkpoint(path, format=format)
    told = 0
    for at in range(1, 1000):
        fill(sharded, 2.0)
        steps.at, steps.seen = at, 0
        with steps.watch(True):
            try:
                sharded.save_checkpoint(path, format=format)
            except StateError as error:
                assert "No space left" in str(error) and "still there" in str(error)
                assert not folders.draft_of(path).exists()  # else the disk would stay full
                told += 1
        if steps.seen < at:
            break
        if held(sharded, path) == 2.0:
            fill(sharded, 1.0)
            sharded.save_checkpoint(path, format=format)
    assert told > 10 and held(sharded, path) == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_the_steps_notice_a_save_in_place(tmp_path):
    """The negative control: written where the previous one is, a failing save leaves nothing that can be loaded."""
    sharded, path = module(), tmp_path / "checkpoint"
    steps = Steps(0, full)
    sys.addaudithook(steps.audit)
    left = []
    with patch.object(folders, "draft_of", lambda place: place):
        for at in (5, 8, 11):
            steps.at, steps.seen = at, 0
            with patch.object(folders, "commit"):
                sharded.save_checkpoint(path)
            with steps.watch(True), contextlib.suppress(StateError):
                sharded.save_checkpoint(path)
            left.append(path.exists() and (path / ".metadata").exists())
    assert not all(left)


def one_fails(rank: int, world: int, group: Any, folder: str) -> dict[str, str]:
    """Saves in which one rank's disk is full, at once and in the background."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, world, mesh=mesh, example_inputs=torch.randn(2, 8))
    path, told = Path(folder) / "checkpoint", {}
    fill(sharded, 1.0)
    sharded.save_checkpoint(path)
    fill(sharded, 2.0)
    for failing in range(world):
        for background in (False, True):
            broken = patch.object(os, "fsync", side_effect=OSError(28, "No space left")) if rank == failing else None
            with broken or contextlib.nullcontext(), pytest.raises(AutoTPError) as caught:
                found = sharded.save_checkpoint(path, background=background)
                found.result()
            told[f"{failing} {background}"] = str(caught.value)
            fill(sharded, -1.0)
            sharded.load_checkpoint(path)
            assert [p.name for p in Path(folder).iterdir()] == ["checkpoint"]
            assert {float(v) for t in sharded.full_state_dict().values() for v in t.unique()} == {1.0}
            fill(sharded, 2.0)
    for value in (3.0, 4.0):
        fill(sharded, value)
        done = sharded.save_checkpoint(path, background=True)
        fill(sharded, 5.0)  # training goes on
        with pytest.raises(AutoTPError, match="still being written"):
            sharded.save_checkpoint(path)
        sharded(torch.ones(2, 8))  # with collectives, while the thread writes
        done.result()
        done.result()
        fill(sharded, 5.0)
        sharded.load_checkpoint(path)
        assert {float(v) for t in sharded.full_state_dict().values() for v in t.unique()} == {value}
    fill(sharded, 6.0)
    sharded.save_checkpoint(path, background=True).result()
    sharded.load_checkpoint(path)
    assert {float(v) for t in sharded.full_state_dict().values() for v in t.unique()} == {6.0}
    return told


def test_all_ranks_fail_together(pool, tmp_path):
    for rank, told in enumerate(pool.run(one_fails, str(tmp_path), world=2)):
        assert len(told) == 4
        for case, text in told.items():
            assert "No space left" in text and (f"rank {case[0]}" in text or case[0] == str(rank)), (case, text)
