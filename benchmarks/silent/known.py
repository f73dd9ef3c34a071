"""Cells that are known to be wrong today, and why: each is tried, and must be taken off when it comes out right."""

from __future__ import annotations

from .cells import Cell

# (axis, way in, way to part) -> why
KNOWN: dict[tuple[str, str, str], str] = {
    ("cp", "backward", "death"): (
        "the tp rank beside one whose cp partner has died is amid a collective, which ends by the group's time-out only"
    ),
}


def known(cell: Cell) -> str:
    """Why a cell is known to be wrong; "" where it is not."""
    return KNOWN.get((cell.mesh.axis, cell.way_in, cell.way_to_part), "")
