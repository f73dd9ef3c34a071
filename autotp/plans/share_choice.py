"""Shares of unlike ranks: read and checked as users give them; and as the solver chose them, with units by family, the
slowest rank's time and memory by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotp.errors import InputError

AUTO = "auto"
MAX_SHARE = 1_000_000


@dataclass(frozen=True)
class Dealing:
    """The uneven split of a dimension, and of all that goes with it.

    Attributes:
        length: elements; 0 of all dimensions whose lengths are symbols, in proportion.
        units: elements of each rank. what: modules whose weights are split so.
    """

    length: int
    units: tuple[int, ...]
    what: str = ""


@dataclass(frozen=True)
class ShareChoice:
    """Shares of unlike ranks.

    Attributes:
        dealt: the split of each family of values that are split alike.
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
        """Lengths of dimensions, and the units of each rank; () where shares were given."""
        units = [(split.length, split.units) for split in self.dealt]
        return () if self.asked else tuple(units)

    @property
    def full(self) -> tuple[int, ...]:
        """Ranks whose part does not fit into their memory."""
        rooms = zip(self.memory, self.limits, strict=True)
        return tuple([rank for rank, (need, limit) in enumerate(rooms) if need > limit])


def read_shares(shares: object, tp: int, groups: Sequence[int] = ()) -> tuple[tuple[int, ...], bool]:
    """Read and check the share of the work of each rank: () for equal ones, and whether the solver is to choose them.

    Args:
        shares: what a public function was given, such as (2, 1); None or "auto" to find them. tp: ranks.
        groups: of a product as tp, whose ranks have copies.

    Raises:
        InputError: they are no whole numbers, not one for each rank, all 0, or rise.
    """
    if shares is None or shares == AUTO and not groups:
        return (), True
    numbers = [*shares] if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    wrong = ""
    if groups:
        wrong = " and a product as tp: unlike ranks hold no copies. Leave out one."
    elif not numbers or not all(type(n) is int and 0 <= n <= MAX_SHARE for n in numbers) or not any(numbers):
        wrong = (
            ": give a whole number for each rank, one of them above 0, such as shares=(2, 1) for a rank that does "
            'twice what the other does, or "auto" to have them found.'
        )
    elif len(numbers) != tp:
        wrong = f" are of {len(numbers)} ranks: give tp={len(numbers)} with them, as a number."
    elif numbers != sorted(numbers, reverse=True):
        wrong = (
            " rise from a rank to the next, and torch's Shard gives none more than the first. Put the devices in the "
            "order of their shares, the largest first, as CUDA_VISIBLE_DEVICES can."
        )
    if wrong:
        raise InputError(f"shares={shares!r}{wrong}")
    return least(numbers), False


def least(ratio: Sequence[int]) -> tuple[int, ...]:
    """Reduce a ratio to its least whole numbers; () where it is even."""
    numbers = tuple([n // math.gcd(*ratio) for n in ratio])
    return numbers if len({*numbers}) > 1 else ()
