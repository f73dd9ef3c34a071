"""A choice among meshes as a drawing: a bar for each row, of what its step is made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.errors import InputError
from autotp.plans import choices
from autotp.text import amount, round_seconds, seconds

from .drawing import template, ticks

if TYPE_CHECKING:
    from autotp.plans.choices import MeshChoice, MeshRow

WIDTH, LEFT, RIGHT, TOP, BAR, LINE = 760, 190, 26, 118, 16, 42


def write_svg(choice: MeshChoice, path: str | Path) -> None:
    """Draw the rows of a choice; see `MeshChoice.to_svg`."""
    if not choice.rows:
        raise InputError("there is nothing to draw: the choice has no rows.")
    marks = ticks(max(row.seconds for row in choice.rows))
    per_second = (WIDTH - LEFT - RIGHT) / marks[-1]
    bars = [_bar(row, TOP + i * LINE, per_second) for i, row in enumerate(choice.rows)]
    svg = template("meshes.svg.jinja").render(
        title=f"{choice.model} on {choice.devices} devices",
        about=f"{choice.cluster}, {choice.examples} examples a step, {amount(choice.limit)} a rank: predicted",
        names=list(choices.TIMES.items()), bars=bars, left=LEFT, right=WIDTH - RIGHT, thick=BAR,
        size=(WIDTH, TOP + len(bars) * LINE + 30), bottom=TOP + len(bars) * LINE,
        marks=[(LEFT + x * per_second, round_seconds(x, marks[-1])) for x in marks],
    )  # fmt: skip
    Path(path).write_text(svg, encoding="utf-8")


def _bar(row: MeshRow, top: float, per_second: float) -> dict[str, Any]:
    """Its label, its parts from left to right, and the reason below it."""
    m, parts, x = row.mesh, [], float(LEFT)
    for name, words in choices.TIMES.items():
        width = row.times[name] * per_second
        if width > 0:
            parts.append((name, x, width, f"{words}: {seconds(row.times[name])} ({row.share(name):.0%})"))
        x += width
    label = f"pp {m.pp}  dp {m.dp}  cp {m.cp}  tp {m.tp}"
    return {"top": top, "label": label, "parts": parts, "why": row.why, "step": choices.step(row)}
