"""Times of all ranks put together: CPU seconds add up, the clock is the slowest one's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .interleaved import Times, ratio


def joined(ranks: Sequence[Times]) -> Times:
    """The times of one thing on all ranks, round by round."""
    cpu = [sum(round_, 0.0) for round_ in zip(*(r.cpu for r in ranks), strict=True)]
    return Times(cpu, [max(round_) for round_ in zip(*(r.wall for r in ranks), strict=True)])


def together(mine: Sequence[Times], base: Sequence[Times]) -> dict[str, float]:
    """Medians over the rounds, and of the ratios to what it is held against."""
    own, other = joined(mine), joined(base)
    return {
        "cpu_s": round(statistics.median(own.cpu), 4),
        "wall_s": round(statistics.median(own.wall), 4),
        "cpu_ratio": round(ratio(own.cpu, other.cpu), 3),
        "wall_ratio": round(ratio(own.wall, other.wall), 3),
    }
