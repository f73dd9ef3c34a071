"""How a value lies over the ranks of one mesh axis: partitions, the layouts, and their duals.

I, R, S and P are those of JAX `shard_map`'s varying and invariant axes and of the package `spmd-types`.
Sizes are ints or sympy expressions over the graph's input sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sympy

Size = int | sympy.Expr
Reduction = Literal["sum", "max"]


def divide(a: Size, b: Size) -> Size | None:
    """`a / b` where that is a whole number for certain, otherwise None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    whole = quotient.is_integer and sympy.denom(quotient) == 1
    return simplify(quotient) if whole else None


def simplify(size: Size) -> Size:
    """The plain int where the expression is one."""
    return int(size) if isinstance(size, sympy.Integer) else size


def chunk(count: int, rank: int, tp: int) -> tuple[int, int]:
    """Offset and number of the units that `rank` owns of `count`: `torch.chunk`'s rule, as DTensor's `Shard`."""
    step = -(-count // tp)
    start = min(rank * step, count)
    return start, min(step, count - start)


@dataclass(frozen=True)
class Segment:
    """`count` units of `unit` consecutive elements; whole units are dealt to the ranks by `chunk`."""

    count: Size
    unit: Size = 1

    @property
    def length(self) -> Size:
        return simplify(self.count * self.unit)


@dataclass(frozen=True)
class Partition:
    """How one dimension is dealt: a run of segments, the run repeated `repeat` times.

    `((N, 1),)` is a plain split, `((q, d), (k, d), (v, d))` a fused q/k/v in whole heads, `((6, 8),)` six heads of
    8. A rank owns its chunk of every segment of every repetition. Make one with `Partition.of`, which brings equal
    distributions to one form, so that `==` means the same elements on every rank.
    """

    segments: tuple[Segment, ...]
    repeat: Size = 1

    @classmethod
    def of(cls, segments: Sequence[Segment], repeat: Size, tp: int) -> Partition:
        """The canonical form for `tp` ranks: largest units (even segments have `tp` of them), repeated runs folded."""
        run = [_coarsest(s, tp) for s in segments if s.length != 0]
        if not run or repeat == 0:
            return cls((Segment(tp, 0),))
        for period in range(1, len(run)):
            if len(run) % period == 0 and run == run[:period] * (len(run) // period):
                return cls(tuple(run[:period]), simplify(repeat * (len(run) // period)))
        return cls(tuple(run), simplify(repeat))

    @classmethod
    def plain(cls, length: Size, tp: int) -> Partition:
        """One segment of single elements."""
        return cls.of([Segment(length, 1)], 1, tp)

    @property
    def length(self) -> Size:
        return simplify(self.repeat * sum(s.length for s in self.segments))

    @property
    def static(self) -> bool:
        return isinstance(self.repeat, int) and all(
            isinstance(s.count, int) and isinstance(s.unit, int) for s in self.segments
        )

    def even(self, tp: int) -> bool:
        """Whether every rank certainly owns the same number of elements."""
        return all(isinstance(s.count, int) and s.count % tp == 0 for s in self.segments)

    def one(self, tp: int) -> bool:
        """Whether what a rank owns lies in one piece, dealt element by element or evenly: as DTensor's `Shard`."""
        alone = len(self.segments) == 1 and self.repeat == 1
        return alone and (self.segments[0].unit == 1 or self.even(tp))

    def full(self, tp: int) -> bool:
        """Whether every rank certainly owns something: the last one owns least."""
        return any(isinstance(s.count, int) and chunk(s.count, tp - 1, tp)[1] > 0 for s in self.segments)

    def lift(self, repeat: Size, unit: Size, tp: int) -> Partition:
        """The partition of a dimension that holds this loop `repeat` times over, `unit` elements a step."""
        segments = [Segment(s.count, simplify(s.unit * unit)) for s in self.segments]
        return Partition.of(segments, simplify(self.repeat * repeat), tp)

    def lower(self, repeat: Size, unit: Size, tp: int) -> Partition | None:
        """The inverse of `lift`, or None where this partition cuts through a unit."""
        times = divide(self.repeat, repeat)
        units = [divide(s.unit, unit) for s in self.segments]
        if times is None or any(u is None for u in units):
            return None
        segments = [Segment(s.count, u) for s, u in zip(self.segments, units, strict=True) if u is not None]
        return Partition.of(segments, times, tp)

    def cut(self, lengths: Sequence[Size], tp: int) -> tuple[Partition, ...] | None:
        """The partitions of consecutive pieces, or None where a boundary falls inside a segment."""
        if not isinstance(self.repeat, int) or self.repeat > 64:
            return None
        run = [s for s in self.segments * self.repeat if s.length != 0]
        pieces, at = [], 0
        for length in lengths:
            start, total = at, 0
            while at < len(run) and total != length:
                total, at = simplify(total + run[at].length), at + 1
            if total != length:
                return None
            pieces.append(Partition.of(run[start:at], 1, tp))
        return tuple(pieces) if at == len(run) else None

    @staticmethod
    def join(parts: Sequence[Distribution], tp: int) -> Partition | None:
        """The partition of a concatenation; None where a part repeats a symbolic or large number of times."""
        run: list[Segment] = []
        for p in parts:
            if not isinstance(p, Partition) or not isinstance(p.repeat, int) or p.repeat > 64:
                return None
            run += p.segments * p.repeat
        return Partition.of(run, 1, tp)

    def local(self, rank: int, tp: int) -> int:
        """Elements of a static partition that `rank` owns."""
        return self.repeat * sum(chunk(s.count, rank, tp)[1] * s.unit for s in self.segments)  # type: ignore[operator]

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        """The (offset, length) runs of a static partition that `rank` owns, in order."""
        return spans(self.repeat, [(s.count, s.unit) for s in self.segments], rank, tp)  # type: ignore[misc,arg-type]


def spans(repeat: int, segments: Sequence[tuple[int, int]], rank: int, tp: int) -> list[tuple[int, int]]:
    """The (offset, length) runs that `rank` owns of `repeat` runs of (count, unit) segments."""
    out, at = [], 0
    for _ in range(repeat):
        for count, unit in segments:
            start, number = chunk(count, rank, tp)
            out.append((at + start * unit, number * unit))
            at += count * unit
    return out


def _coarsest(segment: Segment, tp: int) -> Segment:
    """The same shares in the largest units: as many as divide rank 0's share and the whole."""
    if not isinstance(segment.count, int):
        return segment
    units = math.gcd(segment.count, -(-segment.count // tp))
    return Segment(segment.count // units, simplify(units * segment.unit))


@dataclass(frozen=True)
class Groups:
    """How rows that are sorted by group are dealt: a rank owns the rows of its groups, as many as the data says.

    Every rank keeps all rows in their places. Those of other ranks' groups hold nothing that may be read, and their
    gradients are zero: so row by row operators run as they are, and only a sum over the rows needs them masked.

    Attributes:
        ends: name of the value that holds the row after each group's last, [groups].
        of: how the groups are dealt, one segment.
    """

    ends: str
    of: Partition

    def lift(self, repeat: Size, unit: Size, tp: int) -> Groups | None:
        """The same rows where they are a dimension by themselves, otherwise None; likewise `lower`."""
        return self if repeat == unit == 1 else None

    lower = lift

    def cut(self, lengths: Sequence[Size], tp: int) -> None:
        """Where a boundary falls only the data knows."""

    def even(self, tp: int) -> bool:
        return True  # in what every rank stores

    def full(self, tp: int) -> bool:
        return self.of.full(tp)


Distribution = Partition | Groups  # how a loop may be dealt


@dataclass(frozen=True)
class Layout:
    """Base of the layouts of a value on one mesh axis."""

    @property
    def dual(self) -> Layout:
        """The layout of the value's gradient."""
        return self


@dataclass(frozen=True)
class Invariant(Layout):
    """The whole value, the same on every rank; its gradient is too."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Replicate(Layout):
    """The whole value, the same on every rank; each rank's gradient is one summand."""

    @property
    def dual(self) -> Layout:
        return P

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial(Layout):
    """One summand (or, for `max`, one candidate) of the value on every rank; its gradient is whole on each."""

    reduction: Reduction = "sum"

    @property
    def dual(self) -> Layout:
        return R

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


@dataclass(frozen=True)
class Shard(Layout):
    """One slice of dimension `dim`, dealt by `partition`; its gradient likewise."""

    dim: int
    partition: Partition

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Grouped(Layout):
    """The rows of a rank's groups along dimension `dim`, in their places among all rows; its gradient likewise."""

    dim: int
    partition: Groups

    def __str__(self) -> str:
        return f"G({self.dim})"


I, R, P = Invariant(), Replicate(), Partial()  # noqa: E741  the field's letters


def share(layout: Layout, tp: int, hint) -> float:
    """Largest part of a value that one rank holds."""
    if not isinstance(layout, Shard):
        return 1.0
    held = total = 0
    for s in layout.partition.segments:
        count, unit = hint(s.count), hint(s.unit)
        held, total = held + -(-count // tp) * unit, total + count * unit
    return held / max(total, 1)
