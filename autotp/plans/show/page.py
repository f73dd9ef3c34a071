"""A plan as one self-contained page: blocks, totals, the predicted timeline of one layer, what was left whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotp.cost.rank_memory import Memory
from autotp.plans.estimates import NAMES, REST, Degree
from autotp.plans.plan import Parameter, Plan
from autotp.text import amount, round_seconds

from . import rows
from .drawing import template, ticks
from .timeline import TRACKS, Event, heading, timeline

WIDTH, LEFT, RIGHT = 1200, 108, 24  # of the timeline: all, the names of the tracks, and what the last tick needs
HEIGHT, TOP, GAP = 38, 34, 12  # of a track, above the first, between two
LETTER = 6.1  # width of a letter in the timeline's boxes, on the safe side
BANDS, PIECES = 8, 4  # drawn of a split weight at most
GLYPH = (30, 20)
FITS, NO_FIT = "FITS", "does NOT fit"
KINDS = {**{name: name for name in NAMES}, REST: "everything else", "communication": "communication"}


@dataclass(frozen=True)
class TimelineBox:
    """An event of the timeline as a rectangle; `kind` is its class, `text` what fits in, `tooltip` its words."""

    x: float
    y: float
    width: float
    kind: str
    text: str
    tooltip: str


def write_html(plan: Plan, path: str | Path) -> None:
    """Write a plan as one HTML page that needs nothing else: no scripts, fonts or pictures from elsewhere.

    Args:
        plan: made here or loaded.
        path: of the HTML file.
    """
    Path(path).write_text(html(plan), encoding="utf-8")


def html(plan: Plan) -> str:
    """The page as text."""
    parts = []
    for part in rows.parts(plan):
        parts.append((part, [_glyph(p, plan.tp) for p in part.parameters]))
    return template("page.html.jinja").render(
        plan=plan,
        over=rows.over(plan),
        figures=list(_figures(plan)),
        totals=_joined(rows.totals(plan)),
        memory=list(_memory(plan.memory)),
        timeline=_timeline(plan) if plan.layer is not None else None,
        sublayers=rows.sublayers(plan),
        parts=parts,
        whole=rows.left_whole(plan),
        degrees=[_degree(row) for row in plan.degrees],
        glyph=GLYPH,
        no_fit=NO_FIT,
    )


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """What a reader wants first: a name, a figure, and a remark."""
    t, most = plan.totals, rows.capacity(plan)
    if t.seconds:
        yield "predicted step", rows.seconds(t.seconds), plan.objective
        yield "in communication", f"{t.communication / t.seconds:.1%}", rows.seconds(t.communication)
    share = f"{t.local_parameters / t.parameters:.1%} of {rows.number(t.parameters)}" if t.parameters else ""
    yield "parameters per rank", rows.number(t.local_parameters), share
    fits = plan.memory.peak <= most
    verdict = FITS if fits else NO_FIT
    mark = f"{verdict} into the {amount(most)} of a device" if most else "at the peak"
    yield "memory per rank", amount(plan.memory.peak), mark


def _joined(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows with those that go on with the row before joined to it."""
    out: list[tuple[str, list[str]]] = []
    for name, value in pairs:
        if name or not out:
            out.append((name, []))
        out[-1][1].append(value)
    return out


def _memory(m: Memory) -> Iterator[tuple[str, str, float]]:
    """Parts of the peak: a name, bytes in words, and percent of it."""
    for name, size in rows.memory_parts(m):
        yield name, amount(size), 100 * size / m.peak


def _degree(row: Degree) -> tuple[str, ...]:
    batch = "fixed" if row.largest_batch is None else str(row.largest_batch)
    memory = amount(row.memory) + ("" if row.fits else " (too much)")
    return (
        str(row.tp), rows.seconds(row.seconds), rows.seconds(row.exposed), amount(row.sent), memory, batch,
        f"{rows.number(row.throughput)} {row.unit}/s/device",
    )  # fmt: skip


def _glyph(p: Parameter, tp: int) -> dict[str, Any]:
    """How a weight is cut: rank 0's parts, and the cuts. The first dimension of several goes down, others go across.

    A weight of one piece is cut once for each rank; of several, each of which is dealt separately, these are shown.
    """
    dim = p.layout.sharded_dim
    if dim is None:
        return {"own": [], "cuts": [], "across": False}
    across = dim > 0 or len(p.shape) == 1
    side, pieces = GLYPH[0 if across else 1], p.layout.pieces
    runs = min(pieces, PIECES) if isinstance(pieces, int) else PIECES
    size, bands = side / runs, min(tp, BANDS) if runs == 1 else 1
    own = [(round(i * size, 2), round(size / min(tp, BANDS), 2)) for i in range(runs)]
    return {
        "own": own,
        "cuts": [round(side * i / (runs * bands), 2) for i in range(1, runs * bands)],
        "across": across,
    }


def _timeline(plan: Plan) -> dict[str, Any]:
    """The drawing of one layer: boxes, ticks, and where forward and backward are."""
    assert plan.layer is not None
    events = timeline(plan)
    marks = ticks(events[-1].end if events else 0.0, 10)
    scale = (WIDTH - LEFT - RIGHT) / (events[-1].end if events else 1.0)
    passes = []
    for direction in dict.fromkeys(e.direction for e in events):
        own = [e for e in events if e.direction == direction]
        passes.append((direction, LEFT + scale * own[0].start, LEFT + scale * own[-1].end, own[-1].end - own[0].start))
    tracks = [(name, TOP + i * (HEIGHT + GAP)) for i, name in enumerate(TRACKS)]
    bottom = tracks[-1][1] + HEIGHT
    present = set(map(_kind, events))
    return {
        "heading": heading(plan.layer),
        "events": events,
        "kinds": [(kind, name) for kind, name in KINDS.items() if kind in present],
        "boxes": [_box(e, scale, dict(tracks)[e.track]) for e in events],
        "passes": [(name, x, end, rows.seconds(took)) for name, x, end, took in passes],
        "tracks": tracks,
        "ticks": [(LEFT + scale * t, round_seconds(t, marks[-1])) for t in marks if LEFT + scale * t <= WIDTH - RIGHT],
        "size": (WIDTH, bottom + 34),
        "bottom": bottom,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "seconds": plan.layer.seconds,
    }


def _box(e: Event, scale: float, y: float) -> TimelineBox:
    width = scale * e.seconds
    short = e.label.split(" (")[0]
    text = next((x for x in (e.label, short) if len(x) * LETTER + 6 <= width), "")
    tooltip = f"{e.label}: {rows.seconds(e.seconds)}, {e.direction}, {e.step.part}"
    change = f" ({e.step.change}, {amount(e.step.bytes)})" if e.step.converts else ""
    return TimelineBox(LEFT + scale * e.start, y, width, _kind(e), text, tooltip + change)


def _kind(e: Event) -> str:
    return e.track if e.track in KINDS else e.step.part
