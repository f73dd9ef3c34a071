"""Units of unlike ranks by the integer program, held against every way to deal a few of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autotp.cost.solver.unit_shares import ShareProblem, solve_shares

WRONG = 1  # of which times the other way round cost something


def deals(units: int, least: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal a family, the most to the first."""
    for way in itertools.product(range(units, least - 1, -1), repeat=ranks):
        if sum(way) == units and [*way] == sorted(way, reverse=True):
            yield way


def enumerated(problem: ShareProblem) -> list[float]:
    """Seconds of all deals that fit, the least first."""
    each = [deals(x.shape[2] - 1, problem.least[n], x.shape[1]) for n, x in problem.tables.items()]
    named = [dict(zip(problem.tables, way, strict=True)) for way in itertools.product(*each)]
    return sorted(problem.seconds(u) for u in named if (problem.bytes_held(u) <= problem.limits).all())


def drawn(seed: int, limited: bool = False) -> ShareProblem:
    """Two families on two to four ranks, with tables of any form: tiles, corners, and what no share divides."""
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 5))
    rates = -np.sort(-draw.uniform(0.3, 3.0, 4))[:ranks]
    tables = {}
    for name, units in zip("ab", draw.integers(4, 8, 2), strict=True):
        tile = int(draw.integers(1, 4))
        work = np.maximum(-(-np.arange(units + 1) // tile) * tile * draw.uniform(0.1, 1.0), draw.uniform(0.0, 2.0))
        reads = draw.integers(0, 2, (4, 1, 1))  # of a stretch that has nothing of the family none
        tables[name] = np.concatenate([np.zeros((1, ranks, units + 1)), 1e-3 * reads * work / rates[:, None]])
    tables["a"][0, 0] = 1e-4 * np.arange(tables["a"].shape[2])  # what is sent, as long as the first rank's part
    limits = draw.uniform(3.0, 9.0, ranks) * 1e9 if limited else np.full(ranks, np.inf)
    return ShareProblem(
        least={name: int(draw.integers(0, 2)) for name in tables},
        tables=tables,
        whole=1e-3 * draw.uniform(0.0, 1.0, (5, 1)) / rates,
        counts=draw.integers(1, 4, 5),
        base_bytes=np.full(ranks, 1e9),
        limits=limits,
        bytes={name: float(draw.uniform(0.3, 1.0)) * 1e9 for name in tables},
    )


@pytest.mark.parametrize("limited", [False, True])
def test_none_is_shorter(limited: bool):
    """Of every way to deal the units, in memory that is limited too; what fits nowhere is None."""
    refused = 0
    for seed in range(25):
        problem = drawn(seed, limited)
        every, found = enumerated(problem), solve_shares(problem)
        refused += not every
        assert (found is None) == (not every)
        if found is not None:
            assert (problem.bytes_held(found.units) <= problem.limits).all()
            assert found.seconds == pytest.approx(every[0], rel=1e-5)
            assert found.seconds >= found.bound > 0.999 * every[0]
    assert bool(refused) == limited


def test_wrong_times_are_noticed():
    """The control: with the times of the ranks the other way round the deal is another, and longer."""
    problem = drawn(WRONG)
    turned = replace(problem, tables={n: x[:, ::-1] for n, x in problem.tables.items()}, whole=problem.whole[:, ::-1])
    found = solve_shares(turned)
    assert found is not None and problem.seconds(found.units) > 1.05 * enumerated(problem)[0]


def alone(table: np.ndarray, least: int, whole: tuple[float, float]) -> tuple[int, ...]:
    """Units of one family, which one stretch has."""
    none, free = np.zeros(2), np.full(2, np.inf)
    found = solve_shares(ShareProblem({"a": least}, {"a": table[None]}, np.array([whole]), np.ones(1), none, free))
    assert found is not None
    return found.units["a"]


def test_a_rank_may_have_none():
    """A rank that is so slow that any unit is too much is dealt none, where that is allowed."""
    slow = np.array([[1.0], [50.0]]) * np.arange(9)
    assert alone(slow, 0, (0.0, 0.0)) == (8, 0) and alone(slow, 1, (0.0, 0.0)) == (7, 1)


def test_what_no_share_divides_is_made_up_for():
    """A rank that is as fast, but has more to do beside, is dealt less; operator by operator it would have as much."""
    assert alone(np.arange(21.0)[None].repeat(2, 0), 1, (0.0, 4.0)) == (12, 8)
