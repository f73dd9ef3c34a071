"""The cells of the table: which have a meaning, and which of them, of which rank, on which ranks are tried."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .context import Mesh
from .ways_in import WAYS_IN
from .ways_to_part import AMID, WAYS_TO_PART

MESHES = (Mesh(), Mesh(dp=2), Mesh(cp=2), Mesh(pp=2))
# (way in, way to part) -> why not
LOCAL = {
    ("state_dict", "weight written"): "a rank's own",
    # Of one group; another thread's come between them in another order on each rank, now and then.
    ("Accelerator", "threads"): "collectives of accelerate's own",
}
SHARE = 4  # one in so many is tried where the mesh has two axes


@dataclass(frozen=True)
class Cell:
    """A way in and a way to part, in one of its variants.

    Attributes:
        rank: that is otherwise. use: at which use of a callback it acts. warm: whether all have made the call before.
    """

    mesh: Mesh
    way_in: str
    way_to_part: str
    variant: str = ""
    rank: int = 1
    use: int = 1
    warm: bool = False

    @property
    def model(self) -> str:
        """A kind of `models.py`."""
        kind = WAYS_IN[self.way_in].model
        return "dropping" if self.way_to_part == "seed" and kind == "llama" else kind

    @property
    def at(self) -> str:
        """The callback that acts; "" where none does."""
        return self.variant.rpartition(" at ")[2] if " at " in self.variant else ""

    @property
    def name(self) -> str:
        """Of this cell among those of its mesh."""
        return f"{self.way_in} / {self.way_to_part} / {self.variant}"

    def __str__(self) -> str:
        how = f"rank {self.rank}, use {self.use}{', warm' if self.warm else ''}"
        return f"{self.mesh}: {self.name}, {how}"


def why_not(way_in: str, way_to_part: str, axis: str) -> str:
    """Why a cell has no meaning, in a word or two; "" where it has one."""
    way, part = WAYS_IN[way_in], WAYS_TO_PART[way_to_part]
    if axis not in way.axes:
        return "refused" if axis != "tp" else "pp alone"
    return part.why if part.needs and not getattr(way, part.needs) else LOCAL.get((way_in, way_to_part), "")


def variants(way_in: str, way_to_part: str) -> Iterator[str]:
    """The forms of a cell, by name."""
    way, part = WAYS_IN[way_in], WAYS_TO_PART[way_to_part]
    if part.needs == "options":
        yield from (", ".join(options) for options in way.options)
        return
    for variant in part.variants:
        if not variant.startswith(AMID):
            yield variant
        for at in way.at if variant.startswith(AMID) else ():
            yield f"{variant} at {at}"


def cells(mesh: Mesh, seed: int, only: Sequence[str] = ()) -> list[Cell]:
    """Those that are tried on a mesh.

    Args:
        seed: of what is drawn: rank, use, whether the call is new, and with two axes which cells.
        only: names of ways in, of ways to part, or two with a slash, of which there is one each.
    """
    out = []
    for way_in, way in WAYS_IN.items():
        for way_to_part in WAYS_TO_PART:
            for variant in variants(way_in, way_to_part) if not why_not(way_in, way_to_part, mesh.axis) else ():
                draw = random.Random(f"{seed} {mesh} {way_in} {way_to_part} {variant}")
                rank, use, warm = draw.randrange(mesh.world), draw.randint(1, way.uses), draw.random() < 0.5
                if mesh.axis == "tp" or draw.randrange(SHARE) == 0:
                    out.append(Cell(mesh, way_in, way_to_part, variant, rank, use, warm))
    return [cell for cell in out if not only or _named(cell, only)]


def _named(cell: Cell, only: Sequence[str]) -> bool:
    names = {cell.way_in, cell.way_to_part, f"{cell.way_in}/{cell.way_to_part}"}
    return not names.isdisjoint(only) or f"{cell.way_in}/{cell.way_to_part}/{cell.variant}" in only
