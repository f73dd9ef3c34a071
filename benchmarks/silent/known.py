"""Cells that are known to be wrong today, and why: each is tried, and must be taken off when it comes out right."""

from __future__ import annotations

from .cells import Cell

# (axis, what the name of a cell begins with) -> why
KNOWN = {
    ("cp", "backward / death / amid"): (
        "the tp rank beside one whose cp partner has died is amid a collective, which ends by the group's time-out only"
    ),
    ("pp", "pipe.evaluate / death / amid"): (
        "the rank whose stage before it has left waits for what that sends, until the group's time-out ends it"
    ),
}


def known(cell: Cell) -> str:
    """Why a cell is known to be wrong; "" where it is not."""
    names = (why for (axis, name), why in KNOWN.items() if axis == cell.mesh.axis and cell.name.startswith(name))
    return next(names, "")
