"""Legal plans that nobody would choose: the cheapest one leaves most of what the rules allow untried."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from autotp.cost.solver.problem import Choice, Item, Problem
from autotp.cost.solver.solve import solve
from autotp.ir.program import Solution
from autotp.passes.shard import decide


def any_solution(problem: Problem, seed: int, band: float | None = None, seconds: float = math.inf) -> Solution:
    """One of the legal solutions: the cheapest by prices that are drawn, whatever it sends (no `band`)."""
    draw, drawn = random.Random(seed), dict[Any, float]()

    def free(c: Choice) -> Choice:
        seconds = (draw.random() + (c.factor is None)) * 1e-3  # to split is what is to be tried
        return replace(c, seconds=seconds, parameter_bytes=0.0, activation_bytes=0.0, penalty=0)

    def price(*asked: Any) -> float | None:
        if problem.convert(*asked) is None:
            return None
        return drawn.setdefault(asked, draw.random() * 2e-4)

    items: list[Item] = [replace(item, choices=[*map(free, item.choices)]) for item in problem.items]
    return solve(replace(problem, items=items, convert=price), seconds=seconds)


@contextmanager
def any_plan(seed: int) -> Iterator[None]:
    """Within this context plans are drawn."""
    with patch.object(decide, "solve", partial(any_solution, seed=seed)):
        yield
