"""tests/slow.txt: the tests that carry the mark `slow`, and those of them that `make check` runs (`sample`).

And tests/not_quick.txt: those of the others that take too long for `make quick`, though they start no processes.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[2]
NOT_QUICK_FILE = TESTS / "not_quick.txt"
NOT_QUICK_HEAD = "# Tests that `make quick` leaves out, by what they take; rewritten by `make seconds`.\n"


def _lines(path: Path) -> list[str]:
    return [x for x in path.read_text(encoding="utf-8").splitlines() if x and not x.startswith("#")]


ROWS = [line.split(maxsplit=2) for line in _lines(TESTS / "slow.txt")]
SLOW = {name for _, _, name in ROWS}
SAMPLE = {name for _, when, name in ROWS if when == "check"}
NOT_QUICK = set(_lines(NOT_QUICK_FILE))
