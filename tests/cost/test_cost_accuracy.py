"""The benchmark of predicted against measured steps: what it computes and writes, and one small run on two ranks."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autotp.comm.ranks import Ranks
from autotp.cost import Cluster
from autotp.cost.machines.calibrate import Clock
from benchmarks.cost_accuracy import HEADING, Point, Shape, fitted, page, rank_correlation, step, summary
from benchmarks.helpers.performance import PAGE, write_section

POINTS = [
    Point(1, "a", 1.0, 2.0, 1.5), Point(1, "b", 2.0, 4.0, 2.5),
    Point(2, "a", 3.0, 3.0, 0.5), Point(2, "b", 9.0, 6.0, 0.5),
]  # fmt: skip


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)


def test_errors_are_relative_to_the_measured_time():
    found = summary(POINTS)
    assert (found["mean_error"], found["worst_error"], found["predicted_over_measured"]) == (0.375, 0.5, 0.75)
    assert found["rank_correlation"] == pytest.approx(1 - 6 * 2 / (4 * 15), abs=1e-3)


def test_a_section_is_replaced_and_others_stay(tmp_path):
    path = tmp_path / "page.md"
    write_section("one", "first", path)
    write_section("two", "second\n\n### below\n\ntext", path)
    write_section("one", "changed", path)
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["one", "two"] and text.startswith("# Performance\n")
    assert "changed" in text and "first" not in text and "### below\n\ntext\n" in text


def test_the_page_says_machine_and_versions():
    record = {
        "command": "python -m x", "cores": 2, "machine": "a machine", "torch": "2", "python": "3", "date": "today",
        "load": [0.1, 2.5], "by_tp": {1: summary(POINTS[:2]), 2: summary(POINTS[2:])}, **summary(POINTS),
        "tp_1_cpu": summary(POINTS[:2]),
    }  # fmt: skip
    text = page(record, POINTS)
    assert "| a | 1000.0 | 2000.0 | 1500.0 | 3000.0 | 3000.0 |" in text and "| all | 0.80 | 38% | 50% | 0.75 |" in text
    assert all(str(record[k]) in text for k in ("command", "machine", "torch", "python", "date"))
    assert f"## {HEADING}\n" in PAGE.read_text()


def timed(rank: int, world: int, group: object) -> Point:
    ranks = Ranks.find(world, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))  # type: ignore[arg-type]
    return step(Shape(64, 1, 8), world, Cluster.preset("local"), Clock(ranks, torch.device("cpu"), 0.01))


def test_a_step_is_predicted_and_measured(pool):
    first, second = pool.run(timed, world=4)[:2]
    assert first == second and first.tp == 4 and first.predicted > 0 and first.measured > 0 and first.cpu > 0
    json.dumps([first, fitted(Cluster.preset("local"))])
