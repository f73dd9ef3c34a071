"""Clocks that say what a test wants of the plain way and of the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autotp.runtime.lower.measured import Clock


def clock_by_turns(plain: float, other: float) -> Callable[[torch.device], Clock]:
    """A clock that gives the plain way and the other so many seconds."""

    def of(device: torch.device) -> Clock:
        turns = [0]

        def clock(call: Callable[[], object]) -> float:
            call()
            turns[0] += 1
            return plain if turns[0] % 2 else other

        return clock

    return of
