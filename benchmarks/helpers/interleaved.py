"""Times of several things that do the same, taken in turns: what else runs on the machine then meets all of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Step = Callable[[], object]


class Times(NamedTuple):
    """Seconds of one step in each round: of CPU time of this process with all its threads, and by the clock."""

    cpu: list[float]
    wall: list[float]


def interleaved(
    steps: Mapping[str, Step], rounds: int, repeat: int = 1, before: Step = lambda: None
) -> dict[str, Times]:
    """Time each step once a round, every round in another order; the first round is not counted.

    What a step finds in the allocator and the caches is what the one before it left there: so nobody may always follow
    the same one. The order is drawn from one seed, hence the same on all ranks.

    Args:
        steps: what to time, by name. One that has a `ready` is made so before it is called, which is not counted.
        rounds: how many count.
        repeat: calls that one figure is the mean of.
        before: called before each, such as a barrier of the ranks; not counted.
    """
    found = {name: Times([], []) for name in steps}
    names, order = list(steps), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(rounds + 1):
            for name in order.sample(names, len(names)):
                step = steps[name]
                if hasattr(step, "ready"):
                    step.ready()  # type: ignore[attr-defined]
                before()
                began = time.perf_counter(), time.process_time()
                for _ in range(repeat):
                    step()
                ended = time.perf_counter(), time.process_time()
                if round_:
                    found[name].wall.append((ended[0] - began[0]) / repeat)
                    found[name].cpu.append((ended[1] - began[1]) / repeat)
            gc.collect()
    finally:
        gc.enable()
    return found


def ratio(mine: list[float], base: list[float]) -> float:
    """The median over the rounds of one over the other."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=True))
