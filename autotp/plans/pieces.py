"""Pieces that hold a parameter, and the blocks of it that a rank has: numbers, no tensors.

A plain split is one piece. What DTensor cannot say (a fused q/k/v, uneven whole heads) is held as one piece for each
segment, so that every piece is a plain `Shard` (docs/architecture.md, "One DTensor for each parameter"). Of shares that
are unlike every rank but the last has more than one piece: what all ranks have, what all but those of the least share
have beside it, and so on, each sharded evenly over the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from autotp.ir.layouts import Layout, Partition, Segment, dealt

MAX_PIECES = 16  # of a parameter
BUCKET = 256 * 10**6  # bytes that a rank packs and unpacks at once where blocks are sent


class Block(NamedTuple):
    """A block of a tensor: where it starts in the whole, and how many elements it has in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Block:
        """Return the block that is all of a tensor of this shape."""
        return Block((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return prod(self.size)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return it as an index into a block that starts at `origin`."""
        return tuple(slice(at - o, at - o + n) for at, o, n in zip(self.offset, origin, self.size, strict=True))

    def span(self, dim: int, start: int, length: int) -> Block:
        """Return a part of it along a dimension; `start` is counted in the whole."""
        around = slice(dim), slice(dim + 1, None)
        offset = (*self.offset[around[0]], start, *self.offset[around[1]])
        return Block(offset, (*self.size[around[0]], length, *self.size[around[1]]))

    def common(self, other: Block) -> Block:
        """Return the intersection with another block; it has no elements where they are disjoint."""
        offset, size = list[int](), list[int]()
        for a, n, b, m in zip(*self, *other, strict=True):
            offset.append(max(a, b))
            size.append(max(min(a + n, b + m) - offset[-1], 0))
        return Block(tuple(offset), tuple(size))

    def chunk(self, dim: int, rank: int, ranks: int) -> Block:
        """Return a rank's part where a dimension is split element by element."""
        start, length = dealt(self.size[dim], rank, ranks)
        return self.span(dim, self.offset[dim] + start, length)


@dataclass(frozen=True)
class Piece:
    """One tensor of a parameter.

    Attributes:
        offset, length: along the run of pieces.
        shape: of the piece. dim: the dimension of that which is split; None where every rank holds all of it.
        starts: of unlike shares, where what each rank has of it starts in the run: the piece has a dimension of the
            elements of one rank, and after it the one of so many ranks, which is split.
    """

    offset: int
    length: int
    shape: tuple[int, ...]
    dim: int | None
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """The pieces that hold one parameter of this shape under this layout on `tp` ranks.

    Attributes:
        virtual: ranks that the layout is of, where each of the `tp` has the parts of several of these.
        owners: ranks of an axis beside tp, of which each has a part of dimension 0; the layout is of such a part.
    """

    shape: tuple[int, ...]
    layout: Layout
    tp: int
    virtual: int = 0
    owners: int = 1

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors that hold it: one whole piece where it is not split, and for a bias of uneven heads."""
        whole = (Piece(0, 0, self.shape, None),)
        d, (segments, times) = self.layout.sharded_dim, self._run
        if d is None or not segments or not self._aligned:
            return whole
        out, at, repeat = [], 0, (times,) if times > 1 else ()
        for s in segments:
            assert isinstance(s.count, int) and isinstance(s.unit, int)
            length = s.count * s.unit
            if isinstance(s.deal, tuple):
                if [*s.deal] != sorted(s.deal, reverse=True):  # `torch.chunk` gives the first ranks, if any
                    return whole
                out += self._levels(s, at, d, repeat)
            else:
                # Units larger than one need a dimension of their own, but where a split of single elements is the same.
                flat = Partition.plain(s.length, self.tp).segments == (s,)
                units = (length,) if flat or s.count % self.tp == 0 else (s.count, s.unit)
                if d == 0 and self.owners > 1:
                    units = (units[0] * self.owners, *units[1:])
                shape = (*self.shape[:d], *repeat, *units, *self.shape[d + 1 :])
                out.append(Piece(at, length, shape, d + len(repeat)))
            at += length
        # What picks parameters by their dimensions (weight decay) must not take a bias for a matrix.
        matrices = [x for x in out if len(x.shape) > 1]
        return whole if len(self.shape) == 1 and matrices else tuple(out)

    def _levels(self, s: Segment, at: int, d: int, repeat: tuple[int, ...]) -> Iterator[Piece]:
        """Yield the pieces of a segment of unlike shares of dimension `d`, which starts `at` in the run."""
        assert isinstance(s.deal, tuple)
        unit: Any = s.unit
        below = 0
        for level in sorted({*s.deal} - {0}):
            ranks = sum(n >= level for n in s.deal)
            starts = tuple([at + (sum(s.deal[:rank]) + below) * unit for rank in range(ranks)])
            shape = (*self.shape[:d], *repeat, (level - below) * unit, ranks, *self.shape[d + 1 :])
            yield Piece(at, sum(s.deal) * unit, shape, d + len(repeat) + 1, starts)
            below = level

    @property
    def _aligned(self) -> bool:
        """Return whether the parts of a rank's virtual ranks make up the part that DTensor gives that rank."""
        if not self.virtual or (partition := self.layout.stored) is None:
            return True
        per_rank = self.virtual // self.tp
        for s in partition.segments:
            for v in range(self.virtual):
                count: Any = s.count
                start, here = dealt(count, v // per_rank, self.tp)
                if start + dealt(here, v % per_rank, per_rank)[0] != dealt(count, v, self.virtual)[0]:
                    return False
        return True

    @property
    def _run(self) -> tuple[tuple[Segment, ...], int]:
        """The segments that pieces are made of, and how often their run comes along the sharded dimension.

        A few runs are as many pieces, in the parameter's own dimensions; many are one piece with a dimension more.
        """
        if (partition := self.layout.stored) is None:
            return (), 1
        segments, times = partition.segments, partition.repeat
        assert isinstance(times, int)  # a parameter's size is no symbol
        return (segments * times, 1) if len(segments) * times <= MAX_PIECES else (segments, times)

    def names(self, name: str) -> list[str]:
        """Return the attribute names of the pieces of parameter `name`: its own name where one has its dimensions."""
        if self._plain:
            return [name]
        return [f"{name}_part{i}" for i in range(len(self.pieces))]

    @property
    def _plain(self) -> bool:
        return [len(x.shape) for x in self.pieces] == [len(self.shape)]

    @property
    def split(self) -> bool:
        """Return whether a rank holds a part of it."""
        return self.pieces[0].dim is not None

    @property
    def held_whole(self) -> bool:
        """Return whether every rank holds all of it, and uses a slice."""
        return self.layout.sharded_dim is not None and not self.split

    @property
    def as_held(self) -> bool:
        """Return whether the rank's slice is one DTensor's local tensor in the parameter's own dimensions."""
        return self._plain and not self.held_whole

    def share(self, piece: Piece, rank: int, place: int = 0) -> Block:
        """Return a rank's part of a piece.

        Args:
            piece: of these. rank: among the tp ranks. place: among the owners.
        """
        part = Block.whole(piece.shape)
        part = part.chunk(0, place, self.owners) if self.owners > 1 else part
        return part if piece.dim is None else part.chunk(piece.dim, rank, self.tp)

    def blocks(self, rank: int, spread: tuple[int, int] = (0, 1)) -> list[Block]:
        """Return the blocks of the parameter that a rank holds.

        Args:
            rank: among the tp ranks. spread: where weights are split over an axis beside tp too, or have owners, the
                rank's place on that and its size. Empty blocks are left out, but for a parameter without elements.
        """
        if prod(self.shape) == 0:
            return [Block.whole(self.shape)]
        out = []
        for piece in self.pieces:
            part = self.share(piece, rank, spread[0])
            part = part.chunk(0, *spread) if self.shape and self.owners == 1 else part
            out += self.unfolded(piece, part) if part.elements else ()
        return out

    def unfolded(self, piece: Piece, part: Block) -> Iterator[Block]:
        """Yield the blocks of the parameter that a part of a piece is, one for each repetition, in that for each rank.

        Args:
            piece: of shape `(..., [repeat], count, [unit or ranks], ...)`. part: in the piece's dimensions.
        """
        d, repeat = self.layout.sharded_dim, self._run[1]
        if d is None or self._plain:
            yield part
            return
        (offset, size), repeated = part, repeat > 1
        axis = d + repeated  # of the counts
        units = len(piece.shape) - len(self.shape) - repeated
        unit = piece.shape[axis + 1] if units and not piece.starts else 1
        after = axis + 1 + units
        starts: Sequence[int] = (piece.offset,)
        if piece.starts:
            starts = piece.starts[offset[axis + 1] : offset[axis + 1] + size[axis + 1]]
        for i in range(size[d] if repeated else 1):
            at = (offset[d] + i) * (self.shape[d] // repeat) if repeated else 0
            for first in starts:
                start = (*offset[:d], at + first + offset[axis] * unit, *offset[after:])
                yield Block(start, (*size[:d], size[axis] * unit, *size[after:]))
