"""A plan as one drawing: the weights of each block before, and the parts of each rank after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotp.plans.plan import Parameter, Plan
from autotp.text import amount, seconds

from . import document
from .html import glyph
from .svg import draw, glued

WIDTH, LEFT, AFTER, TOP = 860, 130, 500, 78  # of the drawing: all, where the two sides begin, above the first block
PLACE, SIDE = 84, 46  # of a weight: from one to the next, and the longest edge
LINE, WEIGHTS = 14, 4  # height of a line of text; weights that fit beside each other
MIN_SIDE = 10.0


def write_picture(plan: Plan, path: str | Path) -> None:
    """Draw a plan: see `Plan.to_svg`.

    Args:
        plan: made here or loaded. path: of the SVG file.
    """
    top, parts = TOP, []
    for part in document.parts(plan):
        drawing = _part(part, plan.tp, top)
        if drawing["weights"]:
            parts.append(drawing)
            top += drawing["height"]
    t = plan.totals
    about = f"{plan.cluster}, {plan.objective}: {seconds(t.seconds)} a step, predicted"
    headings = [("before", LEFT), (f"after, on {document.over(plan)} (blue: what rank 0 holds)", AFTER)]
    draw(
        "layer.svg.jinja", path, about=about,
        title=f"{plan.model}: {amount(plan.memory.peak)} at the peak of each of {plan.tp} ranks",
        headings=headings, parts=parts, width=WIDTH, height=top + LINE, left=LEFT,
    )  # fmt: skip


def _part(part: document.EqualBlocks, tp: int, top: int) -> dict[str, Any]:
    """Lay out a block and its equals: matrices beside each other, and below them what is sent."""
    shapes = {p.name: p for p in part.parameters if len(p.shape) > 1}
    longest = max((n for p in shapes.values() for n in p.shape), default=1)
    weights = [_weight(p, part.module, tp, i, top, longest) for i, p in enumerate(list(shapes.values())[:WEIGHTS])]
    sends = list(_sends(part))
    hidden = len(shapes) - len(weights)
    times = [f"x {part.count}"] if part.count > 1 else []
    times += [f"and {hidden} more weights"] if hidden else []
    return {
        "kind": part.kind, "times": ", ".join(times), "top": top, "weights": weights, "sends": sends,
        "height": 106 + LINE * len(sends) + 10,
    }  # fmt: skip


def _sends(part: document.EqualBlocks) -> Iterator[str]:
    """Yield a line for each place where ranks communicate: the collectives forward and backward."""
    for name, change, maker, *ways in part.sends:
        yield f"{name}  {glued(change)}  after {maker}: {', back '.join(ways)}"


def _weight(p: Parameter, module: str, tp: int, index: int, top: int, longest: int) -> dict[str, Any]:
    """Lay out a matrix on both sides: edges go by the root of its sizes, so that small ones are seen."""
    columns, rows = _edge(p.shape[-1], longest), _edge(p.shape[-2], longest)
    drawing, y = glyph(p, tp, (columns, rows)), top + 14 + (SIDE - rows) / 2
    before, after = LEFT + index * PLACE + (PLACE - columns) / 2, AFTER + index * PLACE + (PLACE - columns) / 2
    if drawing["across"]:
        boxes = [(after + a, y, d, rows) for a, d in drawing["local"]]
        cuts = [f"M{after + c:.1f} {y:.1f}v{rows:.1f}" for c in drawing["cuts"]]
    else:
        boxes = [(after, y + a, columns, d) for a, d in drawing["local"]]
        cuts = [f"M{after:.1f} {y + c:.1f}h{columns:.1f}" for c in drawing["cuts"]]
    corners = [(round(x, 1), round(y, 1), round(w, 1), round(h, 1)) for x, y, w, h in boxes]
    return {
        "name": p.name.removeprefix(module + ".").removesuffix(".weight"), "role": p.role,
        "whole": document.shape(p.shape), "local": document.shape(p.local),
        "before": round(before, 1), "after": round(after, 1), "y": round(y, 1),
        "size": (round(columns, 1), round(rows, 1)), "local_boxes": corners,
        "cuts": cuts,
    }  # fmt: skip


def _edge(size: int, longest: int) -> float:
    """Return the edge of a matrix of this size, where the longest one has that size."""
    return max(MIN_SIDE, SIDE * (size / longest) ** 0.5)
