"""The clock of `benchmarks.turns` counts what it stands around, once."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch
from torch import nn

import autotp
from benchmarks.turns import LIMITS, Clock, clocked, page
from tests.helpers.compare import mesh_of


def test_functions_within_each_other_are_counted_once(monkeypatch):
    ticks = count()
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    clock = Clock()
    inner = clock.around(lambda: None)
    outer = clock.around(lambda: (next(ticks), inner(), next(ticks)))
    inner()
    assert clock.seconds == 1
    outer()
    assert clock.seconds == 1 + 4 and clock.depth == 0


def counted(rank: int, world: int, group: Any) -> tuple[float, float]:
    """Seconds in turns: of a call, and of one with the clock taken away again."""
    x = torch.ones(2, 8)
    sharded = autotp.compile(nn.Sequential(nn.Linear(8, 8)), example_inputs=x, mesh=mesh_of(group))
    with clocked() as clock:
        sharded(x)
    seconds, clock.seconds = clock.seconds, 0.0
    sharded(x)
    return seconds, clock.seconds


def test_turns_of_a_call_are_counted(pool):
    for seconds, after in pool.run(counted, world=2):
        assert seconds > 0 and after == 0


def test_the_page_holds_the_limits():
    rows = {name: {"turns_s": 1e-4, "step_s": 1e-1, "share": 1e-3} for name in LIMITS}
    keys = ("command", "rounds", "cores", "machine", "torch", "python", "date", "load_before")
    text = page({"rows": rows} | dict.fromkeys(keys, "?"))
    assert "| a training step | 100 | 100.0 | 0.10% | 0.5% |" in text and "2.0%" in text
