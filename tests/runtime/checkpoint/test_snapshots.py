"""Steps kept in memory of the node: read again, torn, of another run, on other numbers of ranks, and of lost nodes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import AutoTPError, InputError, StateError
from autotp.runtime.checkpoint import shared_memory, snapshots
from autotp.runtime.checkpoint.snapshots import neighbours
from tests.helpers.compare import mesh_of
from tests.helpers.models import inputs_of, transformer
from tests.helpers.states import same

SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def run(monkeypatch, tmp_path):
    """A run of torchrun, whose memory is a folder."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("AUTOTP_MEMORY", str(tmp_path))
    yield tmp_path
    snapshots._open.clear()


def begun(resume: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    """As a process that has just started: the module, its optimizer, and what it keeps."""
    snapshots._open.clear()
    torch.manual_seed(1)  # other weights than those that are kept, of a model of the same names
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(2, 8), resume=resume)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    return sharded, optimizer, sharded.snapshot(optimizer, **options)


def trained(sharded: Any, optimizer: Any, kept: Any, until: int) -> list[float]:
    """Train to a step; what is dropped hangs on torch's generator."""
    losses = []
    for step in range(kept.step, until):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        loss = (sharded(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def test_a_start_goes_on_at_the_step_after_the_last_that_is_kept(run):
    parts = begun(False)
    whole = trained(*parts, until=9)
    parts[2].close()
    parts = begun(extra=lambda: {"place": 7})
    assert (parts[2].step, parts[2].extra) == (0, {})
    losses = trained(*parts, until=4)
    for until, first in ((7, 3), (9, 7)):
        parts[2]._pending[0].result()
        if first == 3:  # as if the copy of step 4, in the second file, had been cut off
            (parts[2]._folder / "1-0-1.json").unlink()
        parts = begun(extra=lambda: {"place": 7})
        assert (parts[2].step, parts[2].extra) == (first, {"place": 7})
        losses[first:] = trained(*parts, until=until)
    assert losses == whole
    parts[2].close()
    assert not files(run, "*.*")


def test_what_is_torn_is_noticed_and_the_step_before_is_used(run):
    parts = begun()
    trained(*parts, until=5)
    parts[2].wait()
    assert begun()[2].step == 5  # negative control: nothing is torn
    trained(*(parts := begun()), until=7)
    parts[2].wait()
    newest = max(files(run, "*.json"), key=lambda file: int(re.findall(r'"step": (\d+),', file.read_text())[0]))
    torn = newest.with_suffix(".data")
    data = bytearray(torn.read_bytes())
    data[len(data) // 2] ^= 1
    torn.write_bytes(data)
    parts = begun()
    assert parts[2].step == 6
    trained(*parts, until=8)
    parts[2].wait()
    for file in files(run, "*.data"):
        file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(StateError, match="holds step 7 of this run in part only"):
        begun()


def test_another_run_or_model_is_never_read(run, monkeypatch):
    parts = begun()
    trained(*parts, until=3)
    parts[2].wait()
    own = parts[2]._folder
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    other = begun()
    assert other[2].step == 0 and other[2]._folder != own
    other[2].close()
    shutil.copytree(own, other[2]._folder)  # even where it lies in the place of this one's
    assert begun()[2].step == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert begun()[2].step == 3
    snapshots._open.clear()
    wider: Any = autotp.compile(nn.Linear(8, 4), 1, example_inputs=torch.randn(2, 8), resume=True)
    assert wider.snapshot(torch.optim.SGD(wider.parameters(), lr=1.0)).step == 0


def test_memory_of_ended_runs_is_cleared_and_of_running_ones_is_not(run):
    first = begun()[2]._folder
    (gone := first.with_name("gone")).mkdir()
    (gone / f"launcher-{shared_memory._launcher(0).split('-')[0]}-{2**22 + 1}-5").touch()
    (elsewhere := first.with_name("elsewhere")).mkdir()
    (elsewhere / "launcher-1-2-3").touch()  # of another container
    begun()
    assert first.exists() and elsewhere.exists() and not gone.exists()


def test_memory_is_as_printed(run):
    sharded, optimizer, kept = begun()
    said = str(kept)
    trained(sharded, optimizer, kept, until=3)
    kept.wait()
    sizes = [file.stat().st_size for file in files(run, "*.data")]
    assert len(sizes) == 2 and f"{sum(sizes) / 1e6:,.1f} MB of all ranks of this node" in said
    kept_bytes = sum(p.numel() * 4 * 3 for p in sharded.parameters())
    assert f"every 1: {kept_bytes / 1e6:,.1f} MB of this rank" in said and "about 1.3 of one copy" in said
    assert {file.name for file in files(run, "*.data")} == {"1-0-0.data", "1-0-1.data"}
    last = str(begun()[2])
    assert f"until the first step is kept also {sizes[0] / 1e6:,.1f} MB of the start before" in last
    assert "of the start before" not in said


def test_weights_that_are_written_while_they_are_copied_are_refused(run, monkeypatch):
    sharded, optimizer, kept = begun()
    trained(sharded, optimizer, kept, until=2)
    ready, copy = threading.Event(), shared_memory.copy
    kept.wait()
    monkeypatch.setattr(shared_memory, "copy", lambda *args: (ready.wait(), copy(*args))[1])
    trained(sharded, optimizer, kept, until=3)
    with torch.no_grad():
        next(sharded.parameters()).zero_()
    ready.set()
    with pytest.raises(StateError, match="were written while they were copied"):
        kept.wait()
    assert begun()[2].step == 2


@pytest.mark.parametrize("every", [1, 3])
def test_every_third_step(run, every):
    parts = begun(every=every)
    trained(*parts, until=5)
    parts[2].wait()
    assert begun()[2].step == {1: 5, 3: 3}[every]


def test_bad_input_is_refused(run, monkeypatch):
    sharded, optimizer, kept = begun()
    with pytest.raises(StateError, match="keeps steps of such a model already"):
        sharded.snapshot(optimizer)
    kept.close()
    for options in ({"every": 0}, {"redundancy": 2}):
        with pytest.raises(InputError, match="keep every so many steps"):
            sharded.snapshot(optimizer, **options)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StateError, match="cannot take 0.0 MB: only"):
            begun()
    sharded, optimizer, kept = begun(extra=lambda: {"place": object()})
    trained(sharded, optimizer, kept, until=1)
    with pytest.raises(StateError, match="is saved as JSON, and cannot be"):
        kept.wait()
    with pytest.raises(InputError, match="give example_inputs"):
        autotp.compile(nn.Linear(8, 8), resume=True)
    for name in ("none", None):
        snapshots._open.clear()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name) if name else monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        with pytest.raises(StateError, match="an --rdzv-id of its own"):
            sharded.snapshot(optimizer)


def test_second_copies_are_on_other_nodes():
    assert neighbours(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert neighbours(["a", "b", "c"]) == [1, 2, 0]
    assert neighbours(["a", "a", "a", "b"]) == [3, 3, 3, 0]
    assert neighbours(["a", "a"]) == [1, 0]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def on_ranks(group: Any, split: bool | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Llama of six heads over a pool's group; or two layers, on four ranks over dp beside tp, split over both."""
    snapshots._open.clear()
    axes: dict[str, Any] = {"mesh": mesh_of(group)}
    model: Any = transformer("llama-uneven", **SIX) if split is None else None
    torch.manual_seed(5)
    made = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) if model is None else type(model)(model.config)
    if split and group.size() == 4:
        axes = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "dp": 2, "fully_shard": True}
    sharded: Any = autotp.compile(made, example_inputs=inputs(split), resume=True, **axes)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    return sharded, optimizer, sharded.snapshot(optimizer, **options)


def inputs(split: bool | None, seed: int = 0) -> dict[str, Tensor]:
    """Of such a module, by name."""
    if split is None:
        return inputs_of(transformer("llama-uneven", **SIX), seed=seed)
    return {"input": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}


def of_all(sharded: Any, optimizer: Any) -> dict[str, Tensor]:
    """Weights and states, whole."""
    out: dict[str, Tensor] = sharded.full_state_dict()
    for name, storage in sharded.storages():
        owner, _, leaf = name.rpartition(".")
        pieces = [getattr(sharded.get_submodule(owner), n) for n in storage.names(leaf)]
        for key in ("exp_avg", "exp_avg_sq"):
            out[f"{name} {key}"] = storage.full([optimizer.state[p][key] for p in pieces]).clone()
    return out


def of_run(memory: Path) -> None:
    """As torchrun starts a worker, for as long as the worker of the pool lives."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "one", "AUTOTP_MEMORY": str(memory)}


def keeping(
    rank: int, world: int, group: Any, folder: str, nodes: tuple[int, ...], redundancy: int, split: bool | None = None
) -> Any:
    """Two steps, which are kept in memory of the rank's node."""
    of_run(Path(folder, str(nodes[rank])))
    sharded, optimizer, kept = on_ranks(group, split, redundancy=redundancy)
    assert kept.step == 0
    for seed in (1, 2):
        outputs = sharded(**inputs(split, seed))
        getattr(outputs, "logits", outputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            sharded(**inputs(split))  # gathers what is split over dp
    kept.wait()
    return of_all(sharded, optimizer), str(kept)


def going_on(rank: int, world: int, group: Any, folder: str, nodes: tuple[int, ...], split: bool | None = None) -> Any:
    """What a start has, or why there is none."""
    of_run(Path(folder, str(nodes[rank])))
    try:
        sharded, optimizer, kept = on_ranks(group, split)
    except AutoTPError as error:
        return f"{type(error).__name__}: {error}"
    assert kept.step == 2
    return of_all(sharded, optimizer)


@pytest.mark.ranks
def test_a_lost_node_leaves_its_second_copy_and_fewer_ranks(pool, tmp_path):
    (wanted, said), *_ = pool.run(keeping, str(tmp_path), (0, 1, 2), 1, world=3)
    assert "one sending to rank 1" in said and "MB for rank 2" in said
    shutil.rmtree(tmp_path / "1")
    # Node 2 lacks what node 0 holds, and the other way round: both fetch.
    for found in pool.run(going_on, str(tmp_path), (0, 2), world=2):
        same(found, wanted)


@pytest.mark.ranks
def test_without_a_second_copy_ranks_refuse_together_and_with_all_files_any_number_reads_them(pool, tmp_path):
    (wanted, _), *_ = pool.run(keeping, str(tmp_path), (0, 1), 0, world=2)
    shutil.copytree(tmp_path, whole := tmp_path.with_name(f"{tmp_path.name}-whole"))
    shutil.rmtree(tmp_path / "1")
    for found in pool.run(going_on, str(tmp_path), (0, 0), world=2):
        assert found.startswith("StateError: memory of the nodes holds step 1 of this run in part only")
    # Four ranks on three nodes, one of which has nothing.
    for found in pool.run(going_on, str(whole), (0, 1, 3, 1), world=4):
        same(found, wanted)


@pytest.mark.ranks
def test_a_node_is_needed_where_weights_are_split_over_dp(pool, tmp_path):
    (wanted, _), *_ = pool.run(keeping, str(tmp_path), (0, 0, 1, 1), 0, True, world=4)
    shutil.copytree(tmp_path, whole := tmp_path.with_name(f"{tmp_path.name}-whole"))
    for found in pool.run(going_on, str(whole), (0, 0, 1), True, world=3):
        same(found, wanted)
    shutil.rmtree(tmp_path / "1")
    for found in pool.run(going_on, str(tmp_path), (0, 0), True, world=2):
        assert "of this run in part only" in found


def test_from_pretrained_reads_its_folder_at_the_first_start_alone(run):
    model: Any = transformer("llama", num_hidden_layers=1)
    model.save_pretrained(run / "folder")
    for step in (0, 1):
        snapshots._open.clear()
        sharded: Any = autotp.from_pretrained(run / "folder", 1, resume=True)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        with torch.no_grad():
            before = sharded(**inputs_of(model)).logits
        kept = sharded.snapshot(optimizer)
        assert kept.step == step and torch.equal(before, model(**inputs_of(model)).logits) is not bool(step)
        sharded(**inputs_of(model)).logits.square().mean().backward()
        optimizer.step()
        kept.wait()
