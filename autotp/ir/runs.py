"""How a dimension is dealt, as a call of a rank's program takes it; whom the units of a dimension belong to."""

from __future__ import annotations

from typing import NamedTuple

from . import windows
from .sizes import chunk
from .windows import Segments


class Runs(NamedTuple):
    """A dimension that is `repeat` runs of `segments`, as in `windows`; a rank owns its chunk of every segment.

    The run-time form of `partitions.Partition`. Numbers are ints, `torch.SymInt` while a program is traced, and while
    one is written the nodes that compute them.
    """

    repeat: int
    segments: Segments

    @property
    def length(self) -> int:
        """Elements of the whole dimension."""
        return self.repeat * sum(windows.lengths(self.segments))

    def local(self, rank: int, tp: int) -> int:
        """Elements that `rank` owns."""
        return self.repeat * sum(length for _, length in windows.shares(self.segments, rank, tp))

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        """The (offset, length) runs that `rank` owns, in order; in elements.

        Example:
            >>> Runs(1, ((4, 2), (2, 1))).spans(1, 2)
            [(4, 4), (9, 1)]
        """
        out, at = [], 0
        for _ in range(self.repeat):
            for count, unit, *back in self.segments:
                start, number = chunk(count, tp - 1 - rank if back else rank, tp)
                out.append((at + start * unit, number * unit))
                at += count * unit
        return out

    def __repr__(self) -> str:
        return repr(tuple(self))
