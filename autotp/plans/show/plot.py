"""Time, memory and exposed communication against tp, with and without sequence parallelism, as a drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.errors import InputError
from autotp.plans.estimates import Degree
from autotp.text import amount, round_seconds

from . import rows
from .drawing import template, ticks

if TYPE_CHECKING:
    from autotp.plans.choices import Sweep

WIDTH, LEFT, RIGHT = 560, 78, 26
TOP, PANEL, BETWEEN, BOTTOM = 112, 170, 52, 44  # above the panels, of one, between two, below
NAMES = (("with", "with sequence parallelism"), ("without", "without sequence parallelism"))
ALONE = (("with", "as planned"),)  # of a single sweep


@dataclass(frozen=True)
class PlotAxis:
    """What a panel shows.

    Attributes:
        title: of the panel; `value`: what of a row is drawn; `words`: a value in words.
        marks: the marks of an axis for these values; `label`: a mark in words, given the highest one.
        factors: equal distances are equal factors; otherwise the axis begins at 0.
    """

    title: str
    value: Callable[[Degree], float]
    words: Callable[[float], str]
    marks: Callable[[Sequence[float]], list[float]]
    label: Callable[[float, float], str]
    factors: bool = True

    def place(self, x: float, marks: Sequence[float]) -> float:
        """The place of a value between the first mark, 0, and the last one, 1."""
        scale = math.log if self.factors else float
        low, high = scale(marks[0]), scale(marks[-1])
        return (scale(x) - low) / (high - low)


def write_svg(sweep: Sweep, path: str | Path, without: Sweep | None = None) -> None:
    """Draw a sweep, or one with sequence parallelism beside one without; see `Sweep.to_svg`."""
    sweeps = (sweep,) if without is None else (sweep, without)
    _check(sweeps)
    Path(path).write_text(_svg(sweeps), encoding="utf-8")


def _check(sweeps: Sequence[Sweep]) -> None:
    if not all(sweep.rows for sweep in sweeps):
        raise InputError("there is nothing to draw: a sweep has no rows. Give it degrees (tps=).")
    for name in ("model", "cluster", "objective", "optimizer", "batch"):
        one, other = getattr(sweeps[0], name), getattr(sweeps[-1], name)
        if one != other:
            raise InputError(f"the sweeps cannot be compared: {name} is {one!r} in one and {other!r} in the other.")


def _svg(sweeps: Sequence[Sweep]) -> str:
    first, names = sweeps[0], NAMES if len(sweeps) > 1 else ALONE
    degrees = sorted({row.tp for sweep in sweeps for row in sweep.rows})
    step = (WIDTH - LEFT - RIGHT) / max(len(degrees), 1)
    columns = {tp: LEFT + step * (i + 0.5) for i, tp in enumerate(degrees)}
    series = [(kind, sweep.rows) for (kind, _), sweep in zip(names, sweeps, strict=True)]
    panels = [
        _panel(axis, series, columns, TOP + i * (PANEL + BETWEEN), first.limit if axis is MEMORY else 0.0)
        for i, axis in enumerate((TIME, MEMORY, EXPOSED))
    ]
    height = TOP + len(panels) * (PANEL + BETWEEN) - BETWEEN + BOTTOM
    about = f"{first.cluster}, {first.objective}, batch of {first.batch}"
    return template("plot.svg.jinja").render(
        model=first.model, about=about, panels=panels, columns=columns, names=names, size=(WIDTH, height),
        left=LEFT, right=WIDTH - RIGHT, panel=PANEL,
    )  # fmt: skip


def _panel(
    axis: PlotAxis, series: Sequence[tuple[str, Sequence[Degree]]], columns: dict[int, float], top: float, limit: float
) -> dict[str, Any]:
    """One panel: marks, lines with their points, and the limit where it lies within."""
    all_values = [axis.value(row) for _, degrees in series for row in degrees]
    marks = axis.marks([x for x in all_values if x > 0] or [1.0])

    def height(x: float) -> float:
        return top + PANEL * (1 - axis.place(x, marks))

    lines = []
    for kind, degrees in series:
        values = [(row, axis.value(row)) for row in sorted(degrees, key=lambda row: row.tp)]
        heights = [(row.tp, x) for row, x in values if x or not axis.factors]
        points = [(columns[tp], height(x), f"tp={tp}, {kind}: {axis.words(x)}") for tp, x in heights]
        lines.append((kind, points))
    inside = marks[0] < limit < marks[-1]
    return {
        "title": axis.title,
        "top": top,
        "marks": [(height(x), axis.label(x, marks[-1])) for x in marks],
        "lines": lines,
        "limit": (height(limit), f"{amount(limit)} a rank") if inside else None,
    }


def _around(values: Sequence[float], candidates: Callable[[int], Iterator[float]], base: float) -> list[float]:
    """Of the candidates of each power of `base` those between the values, and one on either side."""
    low, high = math.floor(math.log(min(values), base)), math.ceil(math.log(max(values), base))
    every = sorted(x for power in range(low - 1, high + 2) for x in candidates(power))
    first = max(x for x in every if x <= min(values))
    last = min(x for x in every if x >= max(values) and x > first)
    return [x for x in every if first <= x <= last]


def _decimal(values: Sequence[float]) -> list[float]:
    return _around(values, lambda power: (x * 10.0**power for x in (1, 2, 5)), 10)


def _binary(values: Sequence[float]) -> list[float]:
    return _around(values, lambda power: iter((2.0**power,)), 2)


def _round_size(nbytes: float, most: float) -> str:
    return amount(nbytes).replace(".0 ", " ")


def _round_each(x: float, most: float) -> str:
    return round_seconds(x, x)


def _even(values: Sequence[float]) -> list[float]:
    return ticks(max(values))


TIME = PlotAxis("step", lambda row: row.seconds, rows.seconds, _decimal, _round_each)
MEMORY = PlotAxis("memory per rank", lambda row: row.memory, amount, _binary, _round_size)
EXPOSED = PlotAxis("exposed communication", lambda row: row.exposed, rows.seconds, _even, round_seconds, factors=False)
