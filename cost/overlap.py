"""Seconds of communication beside arithmetic: a pipeline of two stages, of which one hides part of the other.

Of n equal chunks that pass two stages one after the other, the first chunk of the one stage and the last of the other
stand alone, and between them the slower stage sets the pace. A chunk pays a whole collective's start and a whole
kernel's launch, so small products lose. That a collective takes processors and memory bandwidth from a product beside
it is not counted.
"""

from __future__ import annotations

from collections.abc import Callable

CHOICES = (1, 2, 4, 8)  # numbers of chunks


def pipeline_seconds(first: float, then: float, chunks: int) -> float:
    """Seconds of so many chunks through two stages.

    Args:
        first, then: seconds of one chunk in each stage.
        chunks: how many there are, at least 1.
    """
    return first + then + (chunks - 1) * max(first, then)


def hidden_seconds(communication: float, arithmetic: float) -> float:
    """Seconds that are saved where the two, otherwise one after the other, run beside each other."""
    return min(communication, arithmetic)


def best_chunks(seconds: Callable[[int], float], choices: tuple[int, ...] = CHOICES) -> int:
    """The number of chunks that takes least, of equal ones the smallest.

    Args:
        seconds: what a number of chunks takes in all.
        choices: numbers to choose from.
    """
    return min(choices, key=lambda n: (seconds(n), n))
