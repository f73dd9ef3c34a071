"""A plan as one self-contained page: blocks, totals, the predicted timeline of one layer, what was left whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotp.plans.estimates import NAMES, REST, of_device
from autotp.plans.plan import Parameter, Plan
from autotp.text import amount, number, round_seconds, seconds

from . import document
from .svg import template, ticks
from .timeline import TRACKS, Event, heading, timeline

WIDTH, LEFT, RIGHT = 1200, 108, 24  # of the timeline: all, the names of the tracks, and what the last tick needs
HEIGHT, TOP, GAP = 38, 34, 12  # of a track, above the first, between two
LETTER = 6.1  # width of a letter in the timeline's boxes, on the safe side
BANDS, PIECES = 8, 4  # drawn of a split weight at most
GLYPH = (30, 20)
KINDS = {**{name: name for name in NAMES}, REST: "everything else", "communication": "communication"}


def write_html(plan: Plan, path: str | Path) -> None:
    """Write a plan as one HTML page that needs nothing else: no scripts, fonts or pictures from elsewhere.

    Args:
        plan: made here or loaded.
        path: of the HTML file.
    """
    Path(path).write_text(html(plan), encoding="utf-8")


def html(plan: Plan) -> str:
    """Render the page as text."""
    m = plan.memory
    return template("page.html.jinja").render(
        plan=plan,
        over=document.over(plan),
        figures=list(_figures(plan)),
        totals=document.totals(plan),
        memory=[(name, amount(size), 100 * size / m.peak) for name, size in document.memory_parts(m)],
        timeline=_timeline(plan) if plan.layer is not None else None,
        sublayers=document.sublayers(plan),
        parts=document.parts(plan),
        glyph_of=lambda p: glyph(p, plan.tp),
        whole=document.left_whole(plan),
        degrees=document.degrees(plan.degrees),
        glyph=GLYPH,
    )


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the figures that a reader wants first: a name, a figure, and a remark."""
    t, most, peak = plan.totals, of_device(plan, "memory_size"), plan.memory.peak
    if t.seconds:
        yield "predicted step", seconds(t.seconds), plan.objective
        yield "in communication", f"{t.communication / t.seconds:.1%}", seconds(t.communication)
    share = f"{t.local_parameters / t.parameters:.1%} of {number(t.parameters)}" if t.parameters else ""
    yield "parameters per rank", number(t.local_parameters), share
    verdict = "FITS" if peak <= most else "does NOT fit"
    yield "memory per rank", amount(peak), f"{verdict} into the {amount(most)} of a device" if most else "at the peak"


def glyph(p: Parameter, tp: int, size: tuple[float, float] = GLYPH) -> dict[str, Any]:
    """Lay out rank 0's parts of a weight, and the cuts. The first dimension of several goes down, others go across.

    A weight of one piece is cut once for each rank; of several pieces, each of which is sharded, the pieces are shown.

    Args:
        p: the parameter. tp: ranks. size: width and height of the drawing.
    """
    dim, pieces = p.layout.sharded_dim, p.layout.pieces
    if dim is None:
        return {"local": [], "cuts": [], "across": False}
    across = dim > 0 or len(p.shape) == 1
    side, runs = size[not across], min(pieces, PIECES) if isinstance(pieces, int) else PIECES
    bands = runs * (min(tp, BANDS) if runs == 1 else 1)
    local = [(round(i * side / runs, 2), round(side / runs / min(tp, BANDS), 2)) for i in range(runs)]
    return {"local": local, "cuts": [round(side * i / bands, 2) for i in range(1, bands)], "across": across}


def _timeline(plan: Plan) -> dict[str, Any]:
    """Lay out one layer: boxes, ticks, and the spans of forward and backward."""
    assert plan.layer is not None
    events = timeline(plan)
    end = events[-1].end if events else 1.0
    marks, scale = ticks(end if events else 0.0, 10), (WIDTH - LEFT - RIGHT) / end
    passes = []
    for direction in dict.fromkeys(e.direction for e in events):
        start, *_, stop = [t for e in events if e.direction == direction for t in (e.start, e.end)]
        passes.append((direction, LEFT + scale * start, LEFT + scale * stop, seconds(stop - start)))
    tracks = {name: TOP + i * (HEIGHT + GAP) for i, name in enumerate(TRACKS)}
    bottom, present = max(tracks.values()) + HEIGHT, set(map(_kind, events))
    return {
        "heading": heading(plan.layer),
        "events": events,
        "kinds": [(kind, name) for kind, name in KINDS.items() if kind in present],
        "boxes": [_box(e, scale) | {"y": tracks[e.track]} for e in events],
        "passes": passes,
        "tracks": list(tracks.items()),
        "ticks": [(LEFT + scale * t, round_seconds(t, marks[-1])) for t in marks if LEFT + scale * t <= WIDTH - RIGHT],
        "size": (WIDTH, bottom + 34),
        "bottom": bottom,
        "height": HEIGHT,
    }


def _box(e: Event, scale: float) -> dict[str, Any]:
    """Lay out an event as a rectangle, with the label as far as it fits, and all of it and its figures as tooltip."""
    width = scale * e.seconds
    text = next((x for x in (e.label, e.label.split(" (")[0]) if len(x) * LETTER + 6 <= width), "")
    change = f" ({e.step.change}, {amount(e.step.bytes)})" if e.step.converts else ""
    tooltip = f"{e.label}: {seconds(e.seconds)}, {e.direction}, {e.step.part}{change}"
    return {"x": LEFT + scale * e.start, "width": width, "kind": _kind(e), "text": text, "tooltip": tooltip}


def _kind(e: Event) -> str:
    return e.track if e.track in KINDS else e.step.part
