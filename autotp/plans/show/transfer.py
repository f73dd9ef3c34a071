"""Transfers from one sharding to another, as text and as a drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autotp.text import amount, counted

from .svg import draw
from .terminal import Line, Sheet, Table

if TYPE_CHECKING:
    from autotp.plans.transfers import Send, Transfer

MAX_ROWS = 16  # of the sends that are printed; JSON has all
CELL, EDGE, TOP = 56, 96, 84  # of the drawing: a pair of ranks, and what is left of and above the pairs


def view(way: Transfer) -> Sheet:
    """Return the text that `print` shows: the sums, and the sends."""
    return Sheet(_parts(way))


def _parts(way: Transfer) -> Iterator[Line | Table]:
    share = f", {way.bytes / way.gathered:.0%} of the {amount(way.gathered)} of gathering all" if way.gathered else ""
    yield Line(f"{way.model}: from {way.before} to {way.after}".removeprefix(": "), style="bold")
    rounds = counted(len(way.rounds), "round")
    yield Line(f"{amount(way.bytes)} sent{share}, in {rounds} of at most {amount(way.bucket)} a rank")
    rows = [(f"rank {r}", amount(way.outgoing[r]), amount(way.incoming[r]), amount(way.present[r])) for r in way.ranks]
    yield Line()
    yield Table(rows, "lrrr", ("", "sends", "receives", "has already"))
    sends = [(x.name, f"{x.source} -> {x.target}", _where(x), amount(x.nbytes)) for x in way.sends]
    if sends:
        yield Line()
        yield Table(sends[:MAX_ROWS], "lllr", ("tensor", "ranks", "block", "bytes"))
    if len(sends) > MAX_ROWS:
        yield Line(f"and {len(sends) - MAX_ROWS} more sends, all of them in to_json()")


def _where(send: Send) -> str:
    spans = [f"{start}:{start + n}" for start, n in zip(*send.block, strict=True)]
    return f"[{', '.join(spans)}]"


def draw_transfer(way: Transfer, path: str | Path) -> None:
    """Draw how much each rank sends to each, as a table of rows that send and columns that receive.

    Args:
        way: to draw. path: of the SVG file.
    """
    pairs = Counter[tuple[int, int]]()
    for x in (*way.sends, *way.local):
        pairs[x.source, x.target] += x.nbytes
    place, most = {rank: i for i, rank in enumerate(way.ranks)}, max(pairs.values(), default=1)
    cells = [
        {"x": EDGE + CELL * place[target], "y": TOP + CELL * place[source], "own": source == target,
         "opacity": round(0.15 + 0.7 * nbytes / most, 2), "text": amount(nbytes),
         "words": f"rank {source} {'has' if source == target else f'sends rank {target}'} {amount(nbytes)}"}
        for (source, target), nbytes in sorted(pairs.items())
    ]  # fmt: skip
    side = CELL * len(place)
    draw(
        "transfer.svg.jinja", path, title=f"{way.model}: {amount(way.bytes)} sent",
        about=f"from {way.before} to {way.after}", cells=cells,
        ranks=[(rank, CELL * i + CELL / 2) for rank, i in place.items()], cell=CELL, edge=EDGE, top=TOP,
        size=(max(EDGE + side + 20, 420), TOP + side + 20),
    )  # fmt: skip
