"""The branch and bound against enumeration, on random small programs."""

import itertools

import highspy
import numpy as np
import pytest

from autotp.cost.solver import search
from autotp.cost.solver.rows import within
from autotp.cost.solver.search import Search


def random_program(seed: int, items: int = 5, choices: int = 3) -> tuple[highspy.HighsLp, np.ndarray, np.ndarray]:
    """One choice per item, a knapsack over all of them, and random costs: its relaxation is fractional."""
    rng = np.random.default_rng(seed)
    n = items * choices
    weight, cost = rng.integers(1, 100, n).astype(float), -rng.integers(1, 100, n).astype(float)
    rows = np.zeros((items + 1, n))
    for i in range(items):
        rows[i, i * choices : (i + 1) * choices] = 1
    rows[items] = weight
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n, items + 1
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(n), np.ones(n)
    lp.row_lower_ = np.array([1.0] * items + [0.0])
    lp.row_upper_ = np.array([1.0] * items + [float(rng.integers(60, 45 * items))])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(0, n * (items + 1) + 1, n, dtype=np.int32)
    lp.a_matrix_.index_ = np.tile(np.arange(n, dtype=np.int32), items + 1)
    lp.a_matrix_.value_ = rows.ravel()
    return lp, weight, cost


def enumerated(lp: highspy.HighsLp, weight: np.ndarray, cost: np.ndarray, items: int = 5, choices: int = 3) -> float:
    limit, best = lp.row_upper_[items], np.inf
    for picked in itertools.product(range(choices), repeat=items):
        columns = [i * choices + k for i, k in enumerate(picked)]
        if weight[columns].sum() <= limit:
            best = min(best, cost[columns].sum())
    return best


@pytest.mark.parametrize("most", [search.MAX_NODES, 0], ids=["own", "general"])
def test_equal_to_enumeration(monkeypatch, most):
    monkeypatch.setattr(search, "MAX_NODES", most)
    found = 0
    for seed in range(100):
        lp, weight, cost = random_program(seed)
        want, got = enumerated(lp, weight, cost), Search(lp, np.arange(len(cost)), weight).run()
        if np.isinf(want):
            assert got is None
        else:
            assert got is not None
            x, value, bound = got
            assert value == pytest.approx(want) and bound == pytest.approx(want)
            assert cost @ np.round(x) == pytest.approx(want) and weight @ np.round(x) <= lp.row_upper_[5]
            found += 1
    assert 50 < found < 100, "the programs must be feasible and infeasible"


def test_a_search_that_is_stopped_has_an_assignment_and_the_bound_that_it_proved():
    """No seconds are left: what it has is legal, and lies at the bound at least."""
    gaps = []
    for seed in range(60):
        lp, weight, cost = random_program(seed)
        want = enumerated(lp, weight, cost)
        got = Search(lp, np.arange(len(cost)), weight, limits=[5], deadline=0.0).run()
        assert (got is None) == np.isinf(want)
        if got is not None:
            x, value, bound = np.round(got[0]), *got[1:]
            assert bound - 1e-6 <= want <= value + 1e-6 and value == pytest.approx(cost @ x)
            assert weight @ x <= lp.row_upper_[5] and (x.reshape(5, 3).sum(1) == 1).all()
            gaps.append(value - want)
    assert max(gaps) > 0 and sum(gap < 1e-6 for gap in gaps) > len(gaps) / 3, "some are the best, not all"


def test_relaxations_are_not_enough():
    """The negative control: without branching the random programs above would be wrong."""
    fractional = []
    for seed in range(20):
        lp, weight, _ = random_program(seed)
        got = Search(lp, np.array([], int), weight).run()
        fractional.append(got is not None and np.abs(got[0] - np.round(got[0])).max() > 0.01)
    assert any(fractional)


@pytest.mark.parametrize("seed", range(5))
def test_cover_inequalities_cut_off_fractions_and_no_assignment(seed: int):
    """Every choice of every item that fits into the limit satisfies the rows; what only fits by fractions does not."""
    draw = np.random.default_rng(seed)
    least = draw.integers(1, 20, 8)
    sizes = [[float(n), float(n + more)] for n, more in zip(least, [*draw.integers(1, 60, 6), 40, 60], strict=True)]
    picks = [[2 * i, 2 * i + 1] for i in range(8)]
    limit = sum(size[0] for size in sizes) + 70.0
    rows = within(sizes, {c: n for p, size in zip(picks, sizes, strict=True) for c, n in zip(p, size, strict=True)},
                  picks, limit)  # fmt: skip
    covers = rows[1:]
    for taken in itertools.product((0, 1), repeat=8):
        x = {p[t] for p, t in zip(picks, taken, strict=True)}
        values = [sum(c for i, c in row.terms.items() if i in x) for row in rows]
        fits = values[0] <= limit
        assert fits == all(row.lower <= v <= row.upper for row, v in zip(rows, values, strict=True))
    # The two largest, each by the same fraction, fill the knapsack: more than one of them.
    a, b = sorted(range(8), key=lambda k: sizes[k][0] - sizes[k][1])[:2]
    fraction = 70 / sum(sizes[k][1] - sizes[k][0] for k in (a, b))
    assert 2 * fraction > 1 and any({picks[a][1], picks[b][1]} <= row.terms.keys() and row.upper == 1 for row in covers)
