"""tests/slow.txt: the tests that carry the mark `slow`, and those of them that `make check` runs (`sample`)."""

from __future__ import annotations

from pathlib import Path

ROWS = [
    line.split(maxsplit=2)
    for line in (Path(__file__).parents[1] / "slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
SLOW = {name for _, _, name in ROWS}
SAMPLE = {name for _, when, name in ROWS if when == "check"}
