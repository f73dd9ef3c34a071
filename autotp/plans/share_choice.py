"""Shares of unlike ranks, as the solver chose them: units by family, the slowest rank's time, memory by rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dealing:
    """Deal of a dimension, and of all that goes with it.

    Attributes:
        length: elements; 0 of all dimensions whose lengths are symbols, in proportion.
        units: what each rank has of it. what: modules whose weights are dealt so.
    """

    length: int
    units: tuple[int, ...]
    what: str = ""


@dataclass(frozen=True)
class ShareChoice:
    """Shares of unlike ranks.

    Attributes:
        dealt: by family of values that are dealt alike.
        seconds: of a step on the slowest rank, from collective to collective; `even`: those of the even split, and
            `even_fits`, whether each rank can hold that.
        bound: what no shares are below with these placements; `padding`: seconds of a step that go into parts which are
            sent as long as the longest.
        memory: bytes that each rank holds at its fullest moment; limits: of each.
        asked: shares that were given: nothing was searched for.
    """

    dealt: tuple[Dealing, ...] = ()
    seconds: float = 0.0
    even: float = 0.0
    even_fits: bool = True
    bound: float = 0.0
    padding: float = 0.0
    memory: tuple[float, ...] = ()
    limits: tuple[float, ...] = ()
    asked: bool = False

    @property
    def units(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Lengths of dimensions, and what each rank has of them, where that was found."""
        own = tuple([(each.length, each.units) for each in self.dealt])
        return () if self.asked else own

    @property
    def full(self) -> tuple[int, ...]:
        """Ranks that cannot hold what they are dealt."""
        rooms = zip(self.memory, self.limits, strict=True)
        return tuple([i for i, (own, most) in enumerate(rooms) if own > most])
