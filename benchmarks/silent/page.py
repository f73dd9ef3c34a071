"""The section of docs/performance.md that says what was tried, from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.helpers.command import versions
from benchmarks.helpers.performance import table

from .cells import MESHES, SHARE, cells, why_not
from .judge import ERROR, KNOWN, LATE, RIGHT, WITHIN
from .ways_in import WAYS_IN
from .ways_to_part import WAYS_TO_PART

HEADING = "What was tried"
LETTERS = {RIGHT: "R", ERROR: "E", LATE: "L"}
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # mesh -> cell without its mesh -> what became of it


def letters(whats: Iterable[str]) -> str:
    """Of the variants of a cell: R, E, or both; F for a fault."""
    return "".join(sorted({LETTERS.get(what, "F") for what in whats}))


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A row for each way in, a column for each way to part, with tp alone."""
    by_cell: dict[tuple[str, str], list[str]] = {}
    for name, result in found.items():
        way_in, way_to_part, _ = name.split(" / ")
        by_cell.setdefault((way_in, way_to_part), []).append(result["what"])
    out = []
    for way_in, way in WAYS_IN.items():
        if "tp" in way.axes:
            cells_of = [letters(by_cell.get((way_in, part), ())) or "-" for part in WAYS_TO_PART]
            out.append([way_in, *cells_of])
    return out


def counts(results: Results) -> list[list[str]]:
    """A row for each mesh."""
    out = []
    for mesh in MESHES:
        found = results.get(str(mesh), {})
        whats = Counter(result["what"] for result in found.values())
        slowest = max((r["seconds"] for r in found.values() if r["what"] == ERROR), default=0.0)
        faults = sum(whats.values()) - whats[RIGHT] - whats[ERROR] - whats[LATE]
        minutes = sum(result["cpu"] for result in found.values()) / 60
        kinds = [str(whats[RIGHT]), str(whats[ERROR] + whats[LATE]), str(faults)]
        out.append([str(mesh), str(sum(whats.values())), *kinds, f"{slowest:.1f}", f"{minutes:.1f}"])
    return out


def reasons() -> str:
    """Why cells have no meaning, and how many have not, with tp alone."""
    whys = Counter(
        why_not(way_in, part, "tp") for way_in, way in WAYS_IN.items() if "tp" in way.axes for part in WAYS_TO_PART
    )
    return ", ".join(f"{why} ({count})" for why, count in whys.most_common() if why)


def page(record: Mapping[str, Any]) -> str:
    """The section."""
    results: Results = record["results"]
    head = ["", *WAYS_TO_PART]
    text = f"""\
`make silent` (`{record["command"]}`, seed {record["seed"]}): each way into a sharded module by each way in which one
rank may part from the others, in all its variants, {len(cells(MESHES[0], record["seed"]))} in all at tp=2; of those
with a further axis one in {SHARE}, which the seed draws, as it draws the rank, the use of a callback at which it acts,
and whether the call is new. The ranks stay up from cell to cell. Right is either of two: every rank has the numbers of
the original in one process (**R**), or each that lives gets one `AutoTPError` within {WITHIN:.0f} s (**E**), but for a
rank that raised an exception of its own. Afterwards the same call is made alike, and must be right. A dash: no meaning,
with the number of such cells: {reasons()}.
{versions(record)}, {record["date"]}, {record["machine"]}, load average {record["load"]} on {record["cores"]} cores.

{table(head, rows(results.get("tp=2", {})))}
{table(["mesh", "tried", "right", "an error on all", "faults", "slowest error, s", "CPU, minutes"], counts(results))}"""
    if KNOWN:
        lines = [[axis, name, why] for (axis, name), why in KNOWN.items()]
        text += "\nFaults that are known:\n\n" + table(["axis", "cell", "why"], lines)
    return text
