"""Shares of unlike ranks, as public functions are given them: read, and checked at the door."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotp.errors import InputError

MAX_SHARE = 1_000_000


def read_shares(shares: Any, tp: int, groups: Sequence[int] = ()) -> tuple[int, ...]:
    """Read how much of the work each rank is to do, checked; () where all do equally much.

    Args:
        shares: what a public function was given, such as (2, 1); None for equal ones. tp: ranks.
        groups: of a product as tp, whose ranks have copies.

    Raises:
        InputError: they are no whole numbers, not one for each rank, all 0, or rise.
    """
    if shares is None:
        return ()
    numbers = [*shares] if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    if not numbers or not all(type(n) is int and 0 <= n <= MAX_SHARE for n in numbers) or not any(numbers):
        raise InputError(
            f"shares={shares!r}: give a whole number for each rank, one of them above 0, such as shares=(2, 1) for a "
            "rank that does twice what the other does."
        )
    if len(numbers) != tp:
        raise InputError(
            f"shares={shares!r} are of {len(numbers)} ranks: give tp={len(numbers)} with them, as a number."
        )
    if numbers != sorted(numbers, reverse=True):
        raise InputError(
            f"shares={shares!r} rise from a rank to the next, and torch's Shard gives none more than the first. Put "
            "the devices in the order of their shares, the largest first, as CUDA_VISIBLE_DEVICES can."
        )
    if groups:
        raise InputError(f"shares={shares!r} and a product as tp: unlike ranks hold no copies. Leave out one.")
    least = tuple([n // math.gcd(*numbers) for n in numbers])
    return least if len({*least}) > 1 else ()
