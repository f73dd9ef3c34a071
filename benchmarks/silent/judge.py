"""What became of a cell, from what its ranks reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .cells import Cell
from .rank import Report
from .ways_to_part import WAYS_TO_PART

WITHIN = 15.0  # seconds in which ranks hear of it
RIGHT, ERROR = "right", "error"
LATE = "late"  # an error after more than that: of a machine that is busy, or of us
FAULTS = ("silent", "hang", "crash", "refused", "unnamed", "unusable", "nothing")
NAMED = ("death", "exception")  # after which an error names the rank, on some rank
TIME_OUT = re.compile(r"time-out|timed? ?out|in time\b", re.IGNORECASE)
# Cells that are known to be wrong today: each is tried, and must be taken off when it comes out right.
# (axis, what the name of a cell begins with) -> why
KNOWN = {
    ("cp", "backward / death / amid"): (
        "the tp rank beside one whose cp partner has died is amid a collective, which ends by the group's time-out only"
    ),
    ("pp", "pipe.evaluate / death / amid"): (
        "the rank whose stage before it has left waits for what that sends, until the group's time-out ends it"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Of a cell.

    Attributes:
        what: right, error or late; or a fault. silent: numbers are wrong, or a rank heard nothing. hang: only the
            group's time-out ended it, or nothing did. crash: another exception than ours, or the end of a process, on
            a rank that did nothing wrong. refused: an error for what has a right meaning. unnamed: an error that does
            not name the rank that failed. unusable: the same call is not right afterwards. nothing: the rank never was
            otherwise.
        text: why. seconds: until all ranks had heard of it. cpu: seconds of all processes.
        stopped: whether a rank whose script had ended by its error was waited for: afterwards nothing is asked.
    """

    cell: Cell
    what: str
    text: str = ""
    seconds: float = 0.0
    cpu: float = 0.0
    stopped: bool = False

    @property
    def fine(self) -> bool:
        return self.what not in FAULTS


def known(cell: Cell) -> str:
    """Why a cell is known to be wrong; "" where it is not."""
    names = (why for (axis, name), why in KNOWN.items() if axis == cell.mesh.axis and cell.name.startswith(name))
    return next(names, "")


def judged(cell: Cell, reports: Mapping[int, Report], ended: set[int], parted: float) -> Outcome:
    """What became of a cell, before it is done again.

    Args:
        reports: of the ranks that answered. ended: ranks whose process has ended. parted: when the rank was otherwise.
    """
    part = WAYS_TO_PART[cell.way_to_part]
    dead = cell.way_to_part == "death"
    for rank in range(cell.mesh.world):
        if rank in reports or (dead and rank == cell.rank):
            continue
        return Outcome(cell, "crash" if rank in ended else "hang", f"rank {rank} never answered")
    if not parted or (dead and cell.rank in reports):
        return Outcome(cell, "nothing", "the rank never was otherwise")
    # These ranks stay up where a script would end: one that heard in its other thread goes on, and waits for the first.
    stopped = cell.way_to_part == "threads" and any(r.refused and not TIME_OUT.search(r.text) for r in reports.values())
    for rank, report in reports.items():
        own = report.raised and rank == cell.rank
        if report.error and not report.refused and not own:
            return Outcome(cell, "crash", f"rank {rank}: {report.error}: {report.text}")
        if report.wrong:
            return Outcome(cell, "silent", f"rank {rank}: {report.wrong}")
        if report.refused and TIME_OUT.search(report.text) and not part.long and not stopped:
            return Outcome(cell, "hang", f"rank {rank}: {report.error}: {report.text}")
    others = {rank: report for rank, report in reports.items() if not report.raised}
    heard = {rank for rank, report in others.items() if report.refused}
    ends = [r.ended - max(r.began, parted) for rank, r in reports.items() if not (part.long and rank == cell.rank)]
    seconds = max(ends)
    texts = [reports[rank] for rank in sorted(heard)]
    text = f"{texts[0].error}: {texts[0].text}" if texts else ""
    if heard and len(heard) < len(others):
        return Outcome(cell, "silent", f"ranks {sorted(set(others) - heard)} heard nothing; {text}", seconds)
    if not heard:
        return Outcome(cell, RIGHT, "", seconds)
    if part.right:
        return Outcome(cell, "refused", text, seconds)
    if cell.way_to_part in NAMED and not any(f"rank {cell.rank}" in one.text for one in texts):
        return Outcome(cell, "unnamed", text, seconds)
    late = seconds > WITHIN
    return Outcome(cell, LATE if late else ERROR, text, seconds, stopped=stopped and late)
