"""Of the plans within a band of the least seconds the plainest: the stages after the least time.

With t the least seconds and `most` what a plan may take, at most (1 + band) t, in the symbols of `solve.py` and

    B[u, a, b], N[u, a, b]    bytes that a rank sends for a conversion, and the number of its collectives

each stage keeps the rows of those before:

    time             sum of n[i] T[c] x[c] + sum of m[u] w[u, a, b] y[u, a, b] <= most
    bytes            min of sum m[u] B[u, a, b] y[u, a, b]
    collectives      min of sum m[u] N[u, a, b] y[u, a, b]
    partitions       min of sum n[i] K[c] x[c]
    time again       min of the seconds; of equal ones the least S

Sums of bytes and of collectives are those of conversions, so between two plans that differ in arithmetic alone time
decides. What is known already is a bound for the search: an assignment that is at hand is replaced only by a better one,
and what cannot be in a better one is ruled out before the search branches.
"""

from __future__ import annotations

import numpy as np

from .integer_program import IntegerProgram
from .search import Search

BAND = 0.02  # of the least seconds
MOST_NODES = 60  # of one stage, then the general solver takes over: rows of time and of bytes together branch a lot
EQUAL = 1e-9  # of a value: what counts as equal
WHOLE = 1 - 1e-6  # counts differ by 1 at least
TIE = 1e-6  # of the seconds: what the second order may weigh in all
PRICES = 1.0001, 1.3, 3.0  # times what a microsecond is worth at the bound: assignments that are tried first


def plainest(program: IntegerProgram, known: np.ndarray, most: float) -> np.ndarray:
    """Column values of the plan that sends least, and so on, of those that take at most `most` microseconds.

    Args:
        program: with the rows of all stages before.
        known: column values of an assignment that takes no longer.
        most: microseconds.
    """
    time = program.dense(program.microseconds)
    sent, calls, penalty = (program.dense(x) for x in (program.sent_bytes, program.collectives, program.penalty))
    search = program.search({}, time)
    search.add(time, most)
    if sent.any():
        scaled = sent * (1e3 / max(float(sent @ known), 1.0))
        known = _cheaper(search, scaled, time, known, most)
        known = search.least(scaled, known, EQUAL * 1e3, MOST_NODES)
        known = search.least(calls, known, WHOLE, MOST_NODES)
    if penalty @ known > 0:
        known = search.least(penalty, known, WHOLE, MOST_NODES)
    else:
        search.forbid(np.flatnonzero(penalty))
    ties = _with_ties(program, time)
    return search.least(ties, known, EQUAL * float(ties @ known), MOST_NODES)


def _cheaper(search: Search, cost: np.ndarray, time: np.ndarray, known: np.ndarray, most: float) -> np.ndarray:
    """An assignment within the time that costs no more than the known one, often the best: its cost and time together
    are least at the price of time that the bound has (Lagrange's multiplier), where few relaxations are fractional."""
    price = search.price(cost)
    for factor in PRICES if price else ():
        x = search.relaxed(cost + factor * price * time)
        if x is not None and time @ x <= most and cost @ x < cost @ known:
            return x
    return known


def _with_ties(program: IntegerProgram, time: np.ndarray) -> np.ndarray:
    """Microseconds, and ties broken by the second order."""
    second = program.dense(program.second_order)
    return time + second * (TIE * float(np.abs(time).sum()) / 10 / (float(np.abs(second).sum()) or 1.0))

