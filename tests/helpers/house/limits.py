"""The numbers of CONTRIBUTING.md's table, which tests hold: they stand there and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

CONTRIBUTING = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"
ROW = re.compile(r"^\| (.+?) \| (\d+) \|$", re.MULTILINE)


def limits(text: str | None = None) -> dict[str, int]:
    """What may be -> at most how much: the rows of the table whose second cell is a number."""
    return {what: int(number) for what, number in ROW.findall(CONTRIBUTING.read_text() if text is None else text)}


LIMITS = limits()
