"""The ranks: found in every way there is, agreeing or failing all together."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from autotp.comm import ranks as R
from autotp.errors import AutoTPError, InputError, RankError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_process(monkeypatch):
    for name in R.TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("tp", "world"), [(1, None), (8, None), (2, 4), (4, 4), (1, 3)])
def test_degrees_that_fit(tp, world):
    assert R.check_degree(tp, world) == tp


@pytest.mark.parametrize(
    ("tp", "world", "words"),
    [
        (0, None, "tp=0: .*at least 1"),
        (-2, 4, "tp=-2: .*at least 1"),
        (True, None, "tp=True is bool: .*an int"),
        (2.0, None, "tp=2.0 is float"),
        ("2", None, "tp='2' is str"),
        (None, None, "tp=None is NoneType"),
        (8, 4, "tp=8 is larger than the world: there are 4 ranks.*torchrun --nproc-per-node 8"),
        (2, 1, "there is 1 rank"),
        (3, 4, r"tp=3 does not divide the world of 4 ranks.*Choose tp from \[1, 2, 4\]"),
    ],
)
def test_degrees_that_do_not(tp, world, words):
    with pytest.raises(InputError, match=words):
        R.check_degree(tp, world)


def test_one_plain_process_has_no_ranks():
    assert R.Ranks.find(4) is R.Ranks.find(1) is R.Ranks.find() is R.PLAIN_PROCESS
    assert R.PLAIN_PROCESS.holding(torch.nn.Linear(2, 2)).device.type == "cpu"
    with FakeTensorMode():
        there = torch.nn.ParameterList([torch.empty(2, device="cuda")])
    assert R.PLAIN_PROCESS.holding(there).device.type == "cuda"
    ranks = replace(R.PLAIN_PROCESS, mesh=object())  # pyright: ignore[reportArgumentType]
    assert ranks.holding(there) is ranks  # of a mesh each has a device of its own
    R.agree(R.PLAIN_PROCESS, "nothing", {"a": "b"})
    assert R.together(R.PLAIN_PROCESS, "nothing", lambda: 3) == R.broadcast(R.PLAIN_PROCESS, 3) == 3


def test_a_wrong_degree_under_torchrun_is_said_before_any_rank_waits(monkeypatch):
    for name, value in zip(R.TORCHRUN, ("0", "4", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="tp=3 does not divide the world of 4 ranks"):
        R.Ranks.find(3)
    assert not dist.is_initialized()


def test_a_mesh_that_is_none():
    with pytest.raises(InputError, match="mesh is int: pass a torch.distributed DeviceMesh"):
        R.Ranks.find(2, mesh=4)  # pyright: ignore[reportArgumentType]


def test_the_error_without_ranks_gives_the_line_to_type(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert f"torchrun --nproc-per-node 4 {script}" in str(R.no_ranks_error(4, {}))
    for other in ("", "-c", "/usr/bin/pytest", str(tmp_path / "gone.py")):
        monkeypatch.setattr(sys, "argv", [other])
        assert "torchrun --nproc-per-node 4 your_script.py" in str(R.no_ranks_error(4, {}))


def test_values_are_told_by_rank():
    assert R.by_value(["a", "a", "a", "b"]) == "ranks 0-2: a, rank 3: b"
    assert R.by_value(["b", "a", "b", "b", "b"]) == "ranks 0, 2-4: b, rank 1: a"
    assert R.by_value(["x" * 999]).endswith("...")


def error_of(call, *args) -> str:
    try:
        call(*args)
    except AutoTPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def finding(rank, world, group):
    pairs, whole = R.Ranks.find(2), R.Ranks.find()
    assert pairs is not None and whole is not None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "other"))
    given = R.Ranks.find(mesh=mesh)
    assert given is not None
    assert pairs.mesh is not None and whole.mesh is not None
    mine = torch.full((), float(rank))
    dist.all_reduce(mine, group=pairs.group)
    return {
        "pairs": (pairs.rank, pairs.tp, pairs.mesh.ndim, pairs.mesh.mesh_dim_names, pairs.group_name),
        "sum": mine.item(),
        "whole": (whole.rank, whole.tp, whole.mesh.ndim, str(whole.device)),
        "given": (given.rank, given.tp),
        "broadcast": (R.broadcast(pairs, {"from": rank}), R.broadcast(whole, rank)),
        "degree": error_of(R.Ranks.find, 3),
        "mesh size": error_of(R.Ranks.find, 4, mesh),
        "mesh names": error_of(R.Ranks.find, None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))),
    }


def test_ranks_are_found_in_the_group_and_in_a_mesh(pool):
    found = pool.run(finding)
    for rank, one in enumerate(found):
        assert one["pairs"][:4] == (rank % 2, 2, 1, ("tp",))
        assert one["sum"] == [1, 1, 5, 5][rank]  # groups of ranks that follow each other
        assert one["whole"][:3] == (rank, 4, 1) and one["given"] == (rank // 2, 2)
        assert one["broadcast"] == ({"from": rank // 2 * 2}, 0)
        assert "tp=3 does not divide the world of 4 ranks" in one["degree"]
        assert "tp=4, but the mesh has 2 tp ranks" in one["mesh size"]
        assert "none is 'tp'" in one["mesh names"]
    if not torch.cuda.is_available():
        assert {one["whole"][3] for one in found} == {"cpu"}


def agreeing(rank, world, group):
    ranks = R.Ranks.find(world)
    R.agree(ranks, "versions", R.versions())
    mine = {"graph": "abc", "plan": "new" if rank == 3 else "old"} | ({"extra": "1"} if rank == 0 else {})
    return error_of(R.agree, ranks, "the plan", mine)


def test_ranks_that_differ_all_hear_the_same(pool):
    told = pool.run(agreeing)
    assert len(set(told)) == 1
    assert told[0].startswith("RankError: The 4 tp ranks do not agree on the plan:")
    assert "  plan: ranks 0-2: old, rank 3: new\n" in told[0]
    assert "  extra: rank 0: 1, ranks 1-3: (missing)\n" in told[0]
    assert "graph:" not in told[0] and "Usual causes" in told[0]


def failing(rank, world, group):
    def work() -> int:
        if rank in (1, 2):
            raise ValueError(f"no luck on {rank}")
        return rank

    ranks = R.Ranks.find(world)
    fine = R.together(ranks, "counting", lambda: rank + 1)
    try:
        R.together(ranks, "the work", work)
    except (ValueError, RankError) as error:
        return fine, type(error).__name__, str(error)
    return fine, "", ""


def test_ranks_fail_together(pool):
    told = pool.run(failing)
    assert [one[0] for one in told] == [1, 2, 3, 4]
    assert [one[1] for one in told] == ["RankError", "ValueError", "ValueError", "RankError"]
    assert told[1][2] == "no luck on 1"
    assert "it failed on ranks 1-2 of 4" in told[0][2] and "tp rank 2: ValueError: no luck on 2" in told[3][2]


SCRIPT = """
from autotp.comm.ranks import Ranks, agree, versions
import torch.distributed as dist
ranks = Ranks.find(2)
agree(ranks, "versions", versions())
print(f"<{ranks.rank} of {ranks.tp} on {ranks.mesh.mesh_dim_names}>")
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_under_torchrun_the_process_group_is_made(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert all(f"<{rank} of 2 on ('tp',)>" in done.stdout for rank in (0, 1))
