"""Drawings: a sweep over degrees as three panels, meshes as bars; and helpers that drawings and the page share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup

from autotp.errors import InputError
from autotp.plans.estimates import Degree
from autotp.text import amount, round_seconds, seconds

if TYPE_CHECKING:
    from autotp.plans.choices import MeshChoice, Sweep

UNIT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|[mu]?s\b)")
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
WIDTH, LEFT, RIGHT = 560, 78, 26  # of a sweep's panels
TOP, PANEL, BETWEEN, BOTTOM = 112, 170, 52, 44  # above the panels, of one, between two, below
BAR_WIDTH, BAR_LEFT, BAR_TOP, BAR, BAR_LINE = 760, 190, 118, 16, 42  # of meshes
NAMES = (("with", "with sequence parallelism"), ("without", "without sequence parallelism"))
ALONE = (("with", "as planned"),)  # of a single sweep


@cache
def template(name: str) -> jinja2.Template:
    """Load a template of this folder. Values are escaped, and a name that it lacks is an error."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"glued": glued, "breaking": breaking}
    return environment.get_template(name)


def draw(name: str, path: str | Path, **content: Any) -> None:
    """Write a template with this content to a file."""
    Path(path).write_text(template(name).render(content), encoding="utf-8")


def glued(text: str) -> str:
    """Join figures to their units, and layouts by arrows, so that no line breaks within."""
    return UNIT.sub("\u00a0", text).replace(" -> ", "\u00a0\u2192\u00a0")


def breaking(name: str) -> Markup:
    """Return a dotted name that may break after its dots and underscores."""
    out = Markup("")
    for part in re.split(r"([._])", name):
        out += part + Markup("<wbr>") if part in "._" else part
    return out


def ticks(top: float, most: int = 5) -> list[float]:
    """Return round numbers from 0 on, at most `most` steps of one size, of which the last is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(top / most))
    step = next(power * s for s in STEPS if power * s * most >= top * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


# a sweep


class Panel(NamedTuple):
    """A figure of degrees that is drawn against tp.

    Attributes:
        title: of the panel; `value`: of a degree; `words`: a value in words; `label`: a mark, given the highest one.
        base: marks are powers of this, or with 10 once, twice and five times these, and equal distances are equal
            factors; 0: marks begin at 0.
    """

    title: str
    value: Callable[[Degree], float]
    words: Callable[[float], str]
    label: Callable[[float, float], str]
    base: int

    def marks(self, values: Sequence[float]) -> list[float]:
        """Return the marks between these values, and one on either side."""
        if not self.base:
            return ticks(max(values))
        low, high = (math.log(x, self.base) for x in (min(values), max(values)))
        powers = [float(self.base) ** i for i in range(math.floor(low) - 1, math.ceil(high) + 2)]
        within = (1, 2, 5) if self.base == 10 else (1,)
        every = [x * power for power in powers for x in within]
        first = max(x for x in every if x <= min(values))
        last = min(x for x in every if x >= max(values) and x > first)
        return [x for x in every if first <= x <= last]


PANELS = (
    Panel("step", lambda row: row.seconds, seconds, lambda x, top: round_seconds(x, x), 10),
    Panel("memory per rank", lambda row: row.memory, amount, lambda x, top: amount(x).replace(".0 ", " "), 2),
    Panel("exposed communication", lambda row: row.exposed, seconds, round_seconds, 0),
)


def draw_sweep(sweep: Sweep, path: str | Path, without: Sweep | None = None) -> None:
    """Draw a sweep; see `Sweep.to_svg`.

    Args:
        sweep: with its rows. path: of the file. without: one without sequence parallelism, to draw beside it.
    """
    sweeps = (sweep,) if without is None else (sweep, without)
    if not all(x.rows for x in sweeps):
        raise InputError("there is nothing to draw: a sweep has no rows. Give it degrees (tps=).")
    for name in ("model", "cluster", "objective", "optimizer", "batch"):
        one, other = getattr(sweep, name), getattr(sweeps[-1], name)
        if one != other:
            raise InputError(f"the sweeps cannot be compared: {name} is {one!r} in one and {other!r} in the other.")
    names = NAMES if len(sweeps) > 1 else ALONE
    tps = sorted({row.tp for x in sweeps for row in x.rows})
    step = (WIDTH - LEFT - RIGHT) / len(tps)
    columns = {tp: LEFT + step * (i + 0.5) for i, tp in enumerate(tps)}
    series = [(kind, sorted(x.rows, key=lambda row: row.tp)) for (kind, _), x in zip(names, sweeps, strict=True)]
    panels = []
    for i, panel in enumerate(PANELS):
        limit = sweep.limit if panel.title == "memory per rank" else 0.0
        panels.append(_panel(panel, series, columns, TOP + i * (PANEL + BETWEEN), limit))
    about = f"{sweep.cluster}, {sweep.objective}, batch of {sweep.batch}"
    size = WIDTH, TOP + len(panels) * (PANEL + BETWEEN) - BETWEEN + BOTTOM
    draw(
        "plot.svg.jinja", path, model=sweep.model, about=about, panels=panels, columns=columns, names=names,
        size=size, left=LEFT, right=WIDTH - RIGHT, panel=PANEL,
    )  # fmt: skip


def _panel(
    panel: Panel, series: Sequence[tuple[str, Sequence[Degree]]], columns: dict[int, float], top: float, limit: float
) -> dict[str, Any]:
    """Lay out one panel: marks, lines with their points, and the limit where it is within."""
    values = [panel.value(row) for _, rows in series for row in rows]
    marks = panel.marks([x for x in values if x > 0] or [1.0])
    scale = math.log if panel.base else float
    low, high = scale(marks[0]), scale(marks[-1])

    def height(x: float) -> float:
        return top + PANEL * (1 - (scale(x) - low) / (high - low))

    lines = []
    for kind, rows in series:
        heights = [(row.tp, x) for row in rows if (x := panel.value(row)) or not panel.base]
        lines.append((kind, [(columns[tp], height(x), f"tp={tp}, {kind}: {panel.words(x)}") for tp, x in heights]))
    return {
        "title": panel.title, "top": top, "lines": lines,
        "marks": [(height(x), panel.label(x, marks[-1])) for x in marks],
        "limit": (height(limit), f"{amount(limit)} a rank") if marks[0] < limit < marks[-1] else None,
    }  # fmt: skip


# meshes


def draw_meshes(choice: MeshChoice, times: dict[str, str], path: str | Path) -> None:
    """Draw the rows of a choice, for each a bar of the parts of its step; see `MeshChoice.to_svg`.

    Args:
        choice: with its rows. times: the names of the parts, and what they are called. path: of the file.
    """
    if not choice.rows:
        raise InputError("there is nothing to draw: the choice has no rows.")
    marks = ticks(max(row.seconds for row in choice.rows))
    scale = (BAR_WIDTH - BAR_LEFT - RIGHT) / marks[-1]
    bars = []
    for i, row in enumerate(choice.rows):
        parts, x, m = [], float(BAR_LEFT), row.mesh
        for name, words in times.items():
            width = row.times[name] * scale
            tooltip = f"{words}: {seconds(row.times[name])} ({row.share(name):.0%})"
            parts += [(name, x, width, tooltip)] if width > 0 else []
            x += width
        label = f"pp {m.pp}  dp {m.dp}  cp {m.cp}  tp {m.tp}"
        bars.append({"top": BAR_TOP + i * BAR_LINE, "label": label, "parts": parts, "reason": row.reason,
                     "step": seconds(row.seconds)})  # fmt: skip
    bottom = BAR_TOP + len(bars) * BAR_LINE
    draw(
        "meshes.svg.jinja", path, title=f"{choice.model} on {choice.devices} devices",
        about=f"{choice.cluster}, {choice.examples} examples a step, {amount(choice.limit)} a rank: predicted",
        names=list(times.items()), bars=bars, left=BAR_LEFT, right=BAR_WIDTH - RIGHT, thick=BAR,
        size=(BAR_WIDTH, bottom + 30), bottom=bottom,
        marks=[(BAR_LEFT + x * scale, round_seconds(x, marks[-1])) for x in marks],
    )  # fmt: skip
