"""Shares of unlike ranks as decisions: how many units of each family of values every rank has.

Ranks wait for each other at collectives. Between two of them a rank runs its operators one after the other, so of given
placements a step takes

    sum over stretches s of  n[s] max over ranks r of (whole[s, r] + sum over families f of t[f][s, r, u[f, r]])

where u[f, r] are the units of family f that rank r has, sum over r of u[f, r] = N[f], u[f, 0] >= u[f, 1] >= ..., for
torch's `Shard` gives the first ranks most, and held[r] + sum over f of b[f] u[f, r] <= limit[r] bytes. All collectives
are one stretch, in which others wait for the first rank: parts are padded to the longest, which is its own. Times are
tables, for columns are computed in whole tiles and rooflines have corners. Column z[f, r, k] says that u[f, r] >= k,
and a time is the sum of a table's differences; one further column for each stretch is its slowest rank's time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .integer_program import IntegerProgram, Row

Units = Mapping[str, Sequence[float]]  # family -> units of each rank
SECONDS = 20.0  # of CPU, of a search


class Dealt(NamedTuple):
    """Units of each rank by family, the seconds of a step with them, and the lower bound of these."""

    units: dict[str, tuple[int, ...]]
    seconds: float
    bound: float


@dataclass
class ShareProblem:
    """The problem at the head of this file.

    Attributes:
        least: units that each rank must have, by family. tables: seconds, [stretches, ranks, units + 1].
        whole: seconds that no share divides, [stretches, ranks]. counts: how often a step has each stretch.
        base_bytes: that each rank holds whatever units it has. limits: of each. bytes: of a unit, by family.
    """

    least: dict[str, int]
    tables: dict[str, np.ndarray]
    whole: np.ndarray
    counts: np.ndarray
    base_bytes: np.ndarray
    limits: np.ndarray
    bytes: dict[str, float] = field(default_factory=dict)

    def seconds(self, units: Units) -> float:
        """Seconds of a step by these units."""
        return float(self.counts @ self.slowest(units))

    def slowest(self, units: Units) -> np.ndarray:
        """Seconds of each stretch by these units; between whole ones a time is on the line through its neighbours'."""
        times = self.whole.copy()
        for name, table in self.tables.items():
            for rank, n in enumerate(units[name]):
                low = min(int(n), table.shape[2] - 2)
                times[:, rank] += table[:, rank, low] + (n - low) * (table[:, rank, low + 1] - table[:, rank, low])
        return times.max(axis=1)

    def bytes_held(self, units: Units) -> np.ndarray:
        """Bytes that each rank holds."""
        return self.base_bytes + sum(size * np.array(units[name]) for name, size in self.bytes.items())


def solve_shares(problem: ShareProblem, seconds: float = SECONDS) -> Dealt | None:
    """The units with which a step is shortest: exactly, or where its time ends the best that was found, with the bound.

    Args:
        problem: of given placements. seconds: of the search, CPU.

    Returns: None where no units fit into the ranks' memory.
    """
    ranks, program, at = problem.whole.shape[1], IntegerProgram(deadline=time.process_time() + seconds), {}
    scale = max(float(problem.whole.max() + sum(x.max() for x in problem.tables.values())), 1e-30)  # times are 0 to 1
    cost = {}
    for name, table in problem.tables.items():
        count = table.shape[2] - 1
        columns = [program.column(True) for _ in range(ranks * count)]
        at[name] = np.array(columns, int).reshape(ranks, count)
        program.rows += _deal(at[name], problem.least[name])
    # A stretch ends with its slowest rank: a column that is at least the time of each.
    for s, n in enumerate(problem.counts):
        column = program.column(False)
        cost[column] = float(n)
        for rank in range(ranks):
            terms, least = {column: 1.0}, problem.whole[s, rank]
            for name, table in problem.tables.items():
                least += table[s, rank, 0]
                saved = -np.diff(table[s, rank]) / scale
                terms |= zip(at[name][rank].tolist(), saved.tolist(), strict=True)
            program.rows.append(Row(terms, float(least / scale), np.inf))
    # In parts of the room, for bytes are far from what HiGHS' tolerances are made for; less than none stays so.
    for rank, room in enumerate(problem.limits - problem.base_bytes):
        sizes = {c: size / max(abs(room), 1.0) for name, size in problem.bytes.items() for c in at[name][rank].tolist()}
        program.rows.append(Row(sizes, -np.inf, float(np.sign(room))))
    optimum = program.minimise(cost)
    if optimum is None:
        return None
    units = {name: tuple(np.rint(optimum.x[i].sum(axis=1)).astype(int).tolist()) for name, i in at.items()}
    took = problem.seconds(units)
    return Dealt(units, took, min(took, float(optimum.bound) * scale))


def _deal(columns: np.ndarray, least: int) -> list[Row]:
    """Rows: every unit once, none without those before it, no rank more than the one before, the least to each."""
    one = dict.fromkeys(columns.ravel().tolist(), 1.0)
    pairs = [*zip(columns[:, :-1].ravel(), columns[:, 1:].ravel(), strict=True)]
    pairs += [*zip(columns[:-1].ravel(), columns[1:].ravel(), strict=True)]
    rows = [Row({int(first): 1.0, int(second): -1.0}, 0.0, np.inf) for first, second in pairs]
    rows += [Row({int(c): 1.0}, 1.0, 1.0) for c in columns[:, :least].ravel()]
    return [Row(one, columns.shape[1], columns.shape[1]), *rows]
