"""Ranks and what each of them has, in words."""

from __future__ import annotations

from collections.abc import Sequence

WIDEST = 200  # characters of one rank's value in a message


def by_value(values: Sequence[str]) -> str:
    """Which ranks have which value: `ranks 0-2: abc, rank 3: def`."""
    return ", ".join(
        f"{rank_list([rank for rank, other in enumerate(values) if other == value])}: {_short(value)}"
        for value in dict.fromkeys(values)
    )


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2-4`; `ranks` ascend."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    ranges = []
    for first, last in runs:
        ranges.append(str(first) if first == last else f"{first}-{last}")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranges)}"


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."
