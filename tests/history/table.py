"""Writes tests/history/README.md: every historic bug, the mutant, and which witness refused it.

    python -m tests.history.table

Nothing is written unless every mutant is refused.
"""

from __future__ import annotations

from pathlib import Path

from . import float8, gradients, layouts, on_ranks
from .on_ranks import OnRanks
from .prove import Proved
from .row import Row, linked

PAGE = Path(__file__).resolve().parent / "README.md"
ROWS: list[Row] = sorted([*gradients.ROWS, *layouts.ROWS, *float8.ROWS], key=lambda row: row.number)
WITNESSES = ("types", "certificate", "numbers", "ranks")
HEAD = """# Bugs of other systems, put back in

Each row is a bug that a tensor-parallel training or inference system had. `tests/history` has the smallest module with
such a place: it is proved at tp 2 and 4, with sequence parallelism and without. Then the bug itself is put back into
the program of the ranks, and must be noticed, and named. Written by `python -m tests.history.table`.

The witnesses:

- **types**: the layouts of the program's values, held against what their readers were decided to read
- **certificate**: [spmd_types](../../docs/guide.md#proving-a-plan), which others wrote, on the program alone
- **numbers**: `autotp.verify`, every value and every gradient on simulated ranks
- **ranks**: processes, compared with one device: norms, resumed states, evaluation and training again

Each refusal names the place: **numbers** the first value that differs, or its gradient; **certificate** the operator,
the conversion or the output; **ranks** say how far the two are apart. What **numbers** alone sees has the layouts that
it should have, and computes another thing in them. How a dimension is dealt (23 to 26) has no word in the certificate's
types. A bug after the backward, or between calls, is in no program of the ranks, so runs alone show it. Of rows that
travel to their experts (47 to 49) the checker is told nothing: it types one axis, tp, and rows that are sent over dp,
and those that come back, are each rank's own in its words. `autotp.verify` notices 48 and 49
(`tests/proof/test_travel.py`).

Of row 43 the place is tried, scales of gradients that are each rank's own, and not what led there, a compiled largest
value: what is proved is the program that is then compiled.

"""


def witnesses(row: Row | OnRanks) -> tuple[str, ...]:
    """Those that refuse the row's mutant, at every degree of it."""
    if isinstance(row, OnRanks):
        return ("ranks",)
    proved = Proved(row)
    found = [proved.mutated(tp).witnesses for tp in row.degrees]
    return tuple(w for w in WITNESSES if all(w in each for each in found))


def line(row: Row | OnRanks, refused: tuple[str, ...]) -> str:
    """A row of the page."""
    marks = " | ".join("yes" if w in refused else "" for w in WITNESSES)
    return f"| {row.number} | {linked(row.where)} | {row.symptom} | {row.bug} | {marks} |"


def page(refused: dict[int, tuple[str, ...]]) -> str:
    """The page.

    Args:
        refused: the witnesses that refused each row's mutant, by number.
    """
    rows: list[Row | OnRanks] = sorted([*ROWS, *on_ranks.ROWS], key=lambda row: row.number)
    text = HEAD + "| | where | symptom | put back in | " + " | ".join(WITNESSES) + " |\n"
    text += "| ---: | --- | --- | --- |" + " --- |" * len(WITNESSES) + "\n"
    return text + "\n".join(line(row, refused[row.number]) for row in rows) + "\n"


def written() -> dict[int, tuple[str, ...]]:
    """The witnesses by number, as the page has them."""
    found: dict[int, tuple[str, ...]] = {}
    for text in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in text.strip("|").split("|")]
        if len(cells) == 4 + len(WITNESSES) and cells[0].isdigit():
            found[int(cells[0])] = tuple(w for w, c in zip(WITNESSES, cells[4:], strict=True) if c == "yes")
    return found


def main() -> None:
    """The command."""
    refused = {row.number: witnesses(row) for row in [*ROWS, *on_ranks.ROWS]}
    if unseen := [number for number, those in refused.items() if not those]:
        raise SystemExit(f"no witness refuses {unseen}")
    PAGE.write_text(page(refused), encoding="utf-8")


if __name__ == "__main__":
    main()
