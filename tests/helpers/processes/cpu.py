"""CPU seconds of this process and all that it started: unlike a clock, hardly moved by what else a machine does; and
fewer of them."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

COLLECTIONS = 100_000, 50, 100  # captures make objects by the million and few cycles: a twentieth of the suite's time


def collect_rarely() -> None:
    """Leave what is imported by now out of Python's garbage collections, and let these be rare from here on."""
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    gc.enable()


def cpu_seconds() -> float:
    """Of this process, of children that ended and, where /proc tells (Linux), of descendants that live."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_of, _children(os.getpid())))


def _of(pid: int) -> float:
    seconds = 0.0
    with contextlib.suppress(OSError):  # it ended meanwhile
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / TICKS  # utime, stime, and both of children that it waited for
    return seconds + sum(map(_of, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
