"""Distributions of one dimension over the ranks: partitions, of known elements, and groups, which the data decides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .sizes import Size, dealt, divide, largest, read_deal, read_size, record, shared, simplify, write_size

if TYPE_CHECKING:
    from .sizes import Deal, Hint, Simplicity, ToSize, UnitsBy
    from .specs import CopiedRuns, Runs


@record
class Segment:
    """A run of `count` units of `unit` consecutive elements; `deal` says which units a rank gets, see `sizes.dealt`.

    With a deal of True, the reverse order, shares are equal. Shares are whole units where the count is a number, and
    proportions where it is a symbol.
    """

    count: Size
    unit: Size = 1
    deal: Deal = False

    @property
    def length(self) -> Size:
        return simplify(self.count * self.unit)


class Distribution:
    """Base of the ways in which a loop, or a dimension that carries it, is distributed over the ranks.

    A kind answers for itself what depends on it; what a kind does not say is impossible with it.

    Attributes:
        by_data: whether only the data says which elements a rank owns; a parameter cannot be sharded so.
        shared: whether several ranks own the same elements, so that a sum over the ranks would count these twice; of a
            parameter each rank holds its part, and no copies.
        field: a key of its JSON that no other kind has.
    """

    by_data: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    field: ClassVar[str]

    @property
    def length(self) -> Size:
        """Elements of the dimension."""
        raise NotImplementedError

    @property
    def static(self) -> bool:
        """Say whether no size in it is a symbol."""
        return False

    @property
    def pieces(self) -> Size:
        """Number of runs of the dimension that are sharded separately, as those of a fused weight."""
        return 1

    @property
    def unit(self) -> Size | None:
        """Elements that stay together, where that is one number."""
        return None

    def even(self, tp: int) -> bool:
        """Say whether every rank certainly stores the same number of elements."""
        raise NotImplementedError

    def full(self, tp: int) -> bool:
        """Say whether every rank certainly owns something."""
        raise NotImplementedError

    def is_plain(self, tp: int) -> bool:
        """Say whether it is the split that DTensor's `Shard` means."""
        return False

    def lift(self, repeat: Size, unit: Size, tp: int) -> Distribution | None:
        """Return the distribution of a dimension that holds this loop `repeat` times, `unit` elements a step; None if
        there is none."""
        return self if repeat == unit == 1 else None

    def lower(self, repeat: Size, unit: Size, tp: int) -> Distribution | None:
        """Invert `lift`; None where this cuts through a unit."""
        return self if repeat == unit == 1 else None

    def cut(self, lengths: Sequence[Size], tp: int) -> Sequence[Distribution] | None:
        """Return the distributions of consecutive pieces; None where a boundary is inside a part, or is unknown."""
        return None

    def by(self, shares: tuple[int, ...], tp: int, units: UnitsBy = ()) -> Distribution:
        """Return the distribution of this kind by these shares, one for each rank; () for equal ones; or by `units`."""
        return self

    def runs(self) -> Sequence[Segment] | None:
        """List its segments one after the other, to be joined with others; None where it cannot be."""
        return None

    def by_groups(self, ends: int) -> Distribution | None:
        """Return the distribution of rows whose groups are distributed so; `ends` as in `Groups`. None where rows
        cannot follow."""
        return None

    def local(self, rank: int, tp: int) -> int:
        """Count the elements that `rank` owns, where `static`."""
        raise NotImplementedError

    def share(self, tp: int, hint: Hint) -> float:
        """Return the largest part that one rank stores; `hint` gives a number for every size."""
        return 1.0

    def part(self, rank: int, tp: int, hint: Hint) -> float:
        """Return the part that `rank` stores; `hint` as of `share`."""
        return self.share(tp, hint)

    def padding(self, tp: int) -> float:
        """Return the elements that ranks send, each as many as the fullest, over the elements of the dimension."""
        return 1.0

    def small(self, tp: int) -> Self:
        """Make the same kind of distribution with a few elements."""
        return self

    def simplicity(self, tp: int) -> Simplicity:
        """Return the key that orders candidates: even before uneven, few runs before many, plain before repeated."""
        return (not self.even(tp), 1, False, str(self))

    def penalty(self, tp: int) -> int:
        """Return the points that break ties between equal costs."""
        return 0

    def to_runtime(self, size: ToSize) -> Runs | CopiedRuns:
        """Convert to the form that calls of a rank's program take, each size mapped by `size`."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: the data are no distribution of this kind.
        """
        raise NotImplementedError


# ---- the kinds -------------------------------------------------------------------------------------------------------


@record
class Partition(Distribution):
    """Partition of one dimension: a run of segments, the run repeated `repeat` times.

    `((N, 1),)` is a plain split, `((q, d), (k, d), (v, d))` a fused q/k/v in whole heads, `((6, 8),)` six heads of
    8. A rank owns its share of every segment of every repetition. Make one with `Partition.of`, which brings equal
    distributions to one form, so that `==` means the same elements on every rank.
    """

    segments: tuple[Segment, ...]
    repeat: Size = 1
    field = "segments"

    @classmethod
    def of(cls, segments: Sequence[Segment], repeat: Size, tp: int) -> Partition:
        """Make the canonical form for `tp` ranks: largest units (of even segments `tp`), repeated runs folded."""
        run = [_coarsest(s, tp) for s in segments if s.length != 0]
        if not run or repeat == 0:
            return cls((Segment(tp, 0),))
        for period in range(1, len(run)):
            if len(run) % period == 0 and run == run[:period] * (len(run) // period):
                return cls(tuple(run[:period]), simplify(repeat * (len(run) // period)))
        return cls(tuple(run), simplify(repeat))

    @classmethod
    def plain(cls, length: Size, tp: int) -> Partition:
        """Make a partition of one segment of single elements."""
        return cls.of([Segment(length, 1)], 1, tp)

    def by(self, shares: tuple[int, ...], tp: int, units: UnitsBy = ()) -> Partition:
        """Distribute all its elements by shares, in whole tiles where there are many of these."""
        if (deal := shared(self.length, shares, units)) is None:
            return self
        return Partition.of([Segment(self.length // deal[0] if deal[0] > 1 else self.length, *deal)], 1, tp)

    @property
    def length(self) -> Size:
        return simplify(self.repeat * sum(s.length for s in self.segments))

    @property
    def static(self) -> bool:
        return isinstance(self.repeat, int) and all(
            isinstance(s.count, int) and isinstance(s.unit, int) for s in self.segments
        )

    @property
    def pieces(self) -> Size:
        return simplify(self.repeat * len(self.segments))

    @property
    def unit(self) -> Size | None:
        return self.segments[0].unit if len(self.segments) == 1 else None

    def is_plain(self, tp: int) -> bool:
        return self == Partition.plain(self.length, tp)

    def even(self, tp: int) -> bool:
        """Say whether every rank certainly owns the same number of elements."""
        return all(isinstance(s.count, int) and s.count % tp == 0 and type(s.deal) is bool for s in self.segments)

    def full(self, tp: int) -> bool:
        """Say whether every rank certainly owns something."""
        counted = [s for s in self.segments if isinstance(s.count, int)]

        def owns(rank: int) -> bool:
            return any(dealt(s.count, rank, tp, s.deal)[1] for s in counted)

        return all(map(owns, range(tp)))

    def lift(self, repeat: Size, unit: Size, tp: int) -> Partition:
        """Return the partition of a dimension that holds this loop `repeat` times over, `unit` elements a step."""
        if repeat == unit == 1:  # most loops: the dimension is the loop
            return self
        segments = [replace(s, unit=simplify(s.unit * unit)) for s in self.segments]
        return Partition.of(segments, simplify(self.repeat * repeat), tp)

    def lower(self, repeat: Size, unit: Size, tp: int) -> Partition | None:
        """Invert `lift`; None where this partition cuts through a unit."""
        if repeat == unit == 1:
            return self
        times = divide(self.repeat, repeat)
        units = [divide(s.unit, unit) for s in self.segments]
        if times is None or any(u is None for u in units):
            return None
        segments = [replace(s, unit=u) for s, u in zip(self.segments, units, strict=True) if u is not None]
        return Partition.of(segments, times, tp)

    def cut(self, lengths: Sequence[Size], tp: int) -> tuple[Partition, ...] | None:
        """Return the partitions of consecutive pieces; None where a boundary is inside a segment."""
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

    def runs(self) -> Sequence[Segment] | None:
        """List its segments; None where the run repeats a symbolic or large number of times."""
        return self.segments * self.repeat if isinstance(self.repeat, int) and self.repeat <= 64 else None

    @staticmethod
    def join(parts: Sequence[Distribution], tp: int) -> Partition | None:
        """Return the partition of a concatenation; None where a part has no `runs`."""
        joined: list[Segment] = []
        for p in parts:
            run = p.runs()
            if run is None:
                return None
            joined += run
        return Partition.of(joined, 1, tp)

    def by_groups(self, ends: int) -> Groups | None:
        return Groups(ends, self) if self.repeat == len(self.segments) == 1 else None

    def local(self, rank: int, tp: int) -> int:
        """Count the elements of a static partition that `rank` owns."""
        run: Any = sum(dealt(s.count, rank, tp, s.deal)[1] * s.unit for s in self.segments)
        return self.repeat * run

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        """List the (offset, length) runs of a static partition that `rank` owns, in order."""
        return self.to_runtime(int).spans(rank, tp)

    def part(self, rank: int, tp: int, hint: Hint) -> float:
        local = sum(dealt(hint(s.count), rank, tp, s.deal)[1] * hint(s.unit) for s in self.segments)
        return local / max(sum(hint(s.count) * hint(s.unit) for s in self.segments), 1)

    def share(self, tp: int, hint: Hint) -> float:
        part = total = 0
        for s in self.segments:
            count, unit = hint(s.count), hint(s.unit)
            part, total = part + largest(count, tp, s.deal) * unit, total + count * unit
        return part / max(total, 1)

    def padding(self, tp: int) -> float:
        return max([tp * max(s.deal) / sum(s.deal) for s in self.segments if isinstance(s.deal, tuple)], default=1.0)

    def small(self, tp: int) -> Partition:
        def few(s: Segment) -> Segment:
            if isinstance(s.deal, tuple):
                units = tuple([min(n, 1 + (n == max(s.deal))) for n in s.deal])
                return _coarsest(replace(s, count=sum(units), unit=1, deal=units), tp)
            count = min(int(s.count), tp + (s.count % tp != 0))
            return replace(s, count=count, unit=min(int(s.unit), 2))

        return replace(self, segments=tuple(map(few, self.segments)))

    def simplicity(self, tp: int) -> Simplicity:
        return (not self.even(tp), len(self.segments), self.repeat != 1, str(self))

    def penalty(self, tp: int) -> int:
        """Count a point for each further segment and for repetition, two for unevenness."""
        return len(self.segments) - 1 + (self.repeat != 1) + 2 * (not self.even(tp))

    def to_runtime(self, size: ToSize) -> Runs:
        from .specs import Runs  # noqa: PLC0415  a plan is read without torch

        deals: list[tuple[Deal, ...]] = [(s.deal,) * bool(s.deal) for s in self.segments]
        segments = [(size(s.count), size(s.unit), *deal) for s, deal in zip(self.segments, deals, strict=True)]
        return Runs(size(self.repeat), tuple(segments))

    def to_json(self) -> dict[str, Any]:
        segments = []
        for s in self.segments:
            deal = list(s.deal) if isinstance(s.deal, tuple) else s.deal
            segments.append([write_size(s.count), write_size(s.unit), *[deal] * bool(deal)])
        return {"repeat": write_size(self.repeat), "segments": segments}

    @classmethod
    def from_json(cls, data: Any) -> Partition:
        triples = [(read_size(count), read_size(unit), read_deal(deal)) for count, unit, *deal in data["segments"]]
        segments = tuple(Segment(*numbers) for numbers in triples)
        return cls(segments, read_size(data["repeat"]))


@record
class Copies(Distribution):
    """Distribution of units that are fewer than the ranks: `copies` ranks that follow each other have the same ones.

    Key/value heads that are fewer than the ranks are distributed so: a rank has those that its queries read.

    Attributes:
        of: partition of the dimension over the groups of so many ranks.
        copies: ranks of a group; a divisor of their number.
    """

    of: Partition
    copies: int
    shared = True
    field = "copies"

    @classmethod
    def of_units(cls, count: Size, tp: int, groups: Iterable[int] = (), node: int = 0) -> list[Copies]:
        """List the ways to have units on groups of ranks.

        Args:
            count: of units. tp: ranks.
            groups: ranks that a group may have; by default as many as leave every unit a group of its own, or `node`.
            node: ranks of a node, where these are fewer than all.
        """
        if not isinstance(count, int) or count < 2:
            return []
        alone = [tp // n for n in range(count, tp) if tp % n == 0][:1]
        sizes = [n for n in groups or [node] if 1 < n < tp and tp % n == 0 and count % (tp // n) == 0]
        ways = dict.fromkeys(sizes if groups else alone + sizes)
        return [cls(Partition.plain(count, tp // n), n) for n in ways]

    @property
    def length(self) -> Size:
        return self.of.length

    @property
    def static(self) -> bool:
        return self.of.static

    @property
    def pieces(self) -> Size:
        return self.of.pieces

    @property
    def unit(self) -> Size | None:
        return self.of.unit

    def even(self, tp: int) -> bool:
        return self.of.even(tp // self.copies)

    def full(self, tp: int) -> bool:
        return self.of.full(tp // self.copies)

    def lift(self, repeat: Size, unit: Size, tp: int) -> Copies:
        return replace(self, of=self.of.lift(repeat, unit, tp // self.copies))

    def lower(self, repeat: Size, unit: Size, tp: int) -> Copies | None:
        of = self.of.lower(repeat, unit, tp // self.copies)
        return None if of is None else replace(self, of=of)

    def cut(self, lengths: Sequence[Size], tp: int) -> tuple[Copies, ...] | None:
        pieces = self.of.cut(lengths, tp // self.copies)
        if pieces is None:
            return None
        return tuple([replace(self, of=p) for p in pieces])

    def local(self, rank: int, tp: int) -> int:
        return self.of.local(rank // self.copies, tp // self.copies)

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        """List the (offset, length) runs of a static one that `rank` has, in order."""
        return self.of.spans(rank // self.copies, tp // self.copies)

    def share(self, tp: int, hint: Hint) -> float:
        return self.of.share(tp // self.copies, hint)

    def part(self, rank: int, tp: int, hint: Hint) -> float:
        return self.of.part(rank // self.copies, tp // self.copies, hint)

    def padding(self, tp: int) -> float:
        return float(self.copies)

    def small(self, tp: int) -> Copies:
        return replace(self, of=self.of.small(tp // self.copies))

    def simplicity(self, tp: int) -> Simplicity:
        """Return a key that comes after those of partitions that are as even, of as many segments."""
        uneven, segments, repeated, text = self.of.simplicity(tp // self.copies)
        return uneven, segments, repeated, f"{type(self).__name__} {text}".lower()

    def penalty(self, tp: int) -> int:
        return 1 + self.of.penalty(tp // self.copies)

    def to_runtime(self, size: ToSize) -> CopiedRuns:
        from .specs import CopiedRuns  # noqa: PLC0415  a plan is read without torch

        return CopiedRuns(*self.of.to_runtime(size), self.copies)

    def to_json(self) -> dict[str, Any]:
        return {"of": self.of.to_json(), "copies": self.copies}

    @classmethod
    def from_json(cls, data: Any) -> Copies:
        if type(data["copies"]) is not int or data["copies"] < 2:
            raise ValueError(f"a unit is on {data['copies']!r} ranks, should be a number above 1")
        return cls(Partition.from_json(data["of"]), data["copies"])


def _coarsest(segment: Segment, tp: int) -> Segment:
    """Write the same shares in the largest units: as many as divide the share of every rank; by `torch.chunk`'s rule
    where it is that."""
    if not isinstance(segment.count, int):
        return segment
    if (deal := segment.deal) is not True:
        counts = [dealt(segment.count, rank, tp, deal)[1] for rank in range(tp)]
        units = math.gcd(*counts)
        deal = tuple([n // units for n in counts])
        deal = any(n != dealt(sum(deal), rank, tp)[1] for rank, n in enumerate(deal)) and deal
    else:
        units = math.gcd(segment.count, largest(segment.count, tp))
    return Segment(segment.count // units, simplify(units * segment.unit), deal)


@record
class Groups(Distribution):
    """Distribution of rows that are sorted by group: a rank owns the rows of its groups, as many as the data says.

    Every rank keeps all rows in their places. Those of other ranks' groups hold nothing that may be read, and their
    gradients are zero: so row by row operators run as they are, and only a sum over the rows needs them masked.
    The rows lift and lower only where they are a dimension by themselves.

    Attributes:
        ends: number of the value that holds the row after each group's last, [groups], in `Planned.ends`.
        of: distribution of the groups, one segment; of rows that travel, groups of ranks may have the same ones.
    """

    ends: int
    of: Partition | Copies
    by_data = True
    field = "ends"

    def even(self, tp: int) -> bool:
        return True  # in what every rank stores

    def full(self, tp: int) -> bool:
        return self.of.full(tp)

    def to_runtime(self, size: ToSize) -> Runs | CopiedRuns:
        """Convert the groups."""
        return self.of.to_runtime(size)

    def to_json(self) -> dict[str, Any]:
        return {"ends": self.ends, "of": self.of.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Groups:
        if type(data["ends"]) is not int:
            raise TypeError(f"the ends of groups are {data['ends']!r}, which is no number")
        return cls(data["ends"], Partition.from_json(data["of"]))
