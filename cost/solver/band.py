"""Stages of solving after the least time, for the plainest plan within a band of it: the stages after the least time.

With t the least seconds and `most` what a plan may take, at most (1 + band) t, in the symbols of `solve.py` and

    B[u, a, b], N[u, a, b]    bytes that a rank sends for a conversion, and the number of its collectives

each stage keeps the rows of those before:

    time             sum of n[i] T[c] x[c] + sum of m[u] w[u, a, b] y[u, a, b] <= most
    bytes            min of sum m[u] B[u, a, b] y[u, a, b]
    counts           min of (1 + K*) sum m[u] N[u, a, b] y[u, a, b] + sum n[i] (K[c] - least K of i) x[c] over leaves
    seconds          min of sum n[i] T[c] x[c] + sum of m[u] w[u, a, b] y[u, a, b]
    ties             min of S

with K* the most that the second sum comes to. Counts are whole, so their sum is an order: fewest collectives, then the
plainest partitions of parameters; and then the least time, then the least S.

The assignment at hand (the incumbent) is replaced only by a better one, and what cannot be in a better one is ruled out
before the search branches; what takes longer than `most` with the first row. Both matter: rows of time and bytes make
relaxations fractional.

The least time is proved whatever the size. What comes after it is not, where a program has more than
`MAX_EXACT_COLUMNS` columns (a diffusion U-Net): its stages take the incumbent, that at a price of time, or the
relaxation's optimum where it is integral, and do not search: a small longcat_flash of 12,657 columns is solved in 6 CPU
seconds so, and with 24 nodes a stage took 27 for the same plan.
"""

from __future__ import annotations

import numpy as np

from .integer_program import IntegerProgram
from .search import PRICES, Search, Start

BAND = 0.02  # of the least seconds
# Nodes of one stage, then the general solver takes over: rows of time and of bytes together branch a lot.
MAX_STAGE_NODES = 60
MAX_EXACT_COLUMNS = 8_000  # columns: of a larger program the general solver takes minutes (24 s a stage at 16,000)
EQUAL = 1e-9  # of the bytes: what counts as equal
EQUAL_SECONDS = 1e-8  # of the seconds, and of S: what counts as equal at the end
HALF = 0.5  # of a count
SCALE = 1e3  # what an objective comes to: the solver's tolerances are absolute


def plainest(program: IntegerProgram, start: Start, incumbent: np.ndarray, most: float) -> np.ndarray:
    """Column values of the plan that sends least, and so on, of those that take at most `most` microseconds.

    Args:
        program: with the rows of all stages before.
        start: where the least time was found, so that what takes longer than `most` is ruled out at once.
        incumbent: column values of an assignment that takes no longer.
        most: microseconds.
    """
    time, sent_bytes = program.dense(program.microseconds), program.dense(program.sent_bytes)
    search = program.search({}, time, start)
    search.within(time, most)
    exact = len(time) <= MAX_EXACT_COLUMNS
    nodes = MAX_STAGE_NODES if exact else 0
    if sent_bytes.any():
        scaled = sent_bytes * (SCALE / max(float(sent_bytes @ incumbent), 1.0))
        incumbent = _cheaper(search, scaled, time, incumbent, most)
        incumbent = search.least(scaled, incumbent, EQUAL * SCALE, nodes, exact)
    # Counts differ by 1 at least: a collective weighs more than all penalties. Time and ties have stages of their own,
    # each scaled to `SCALE`: beside the counts they would be less than the solver's tolerance.
    one = 1 + program.most_penalty
    counts = program.dense(program.collectives) + program.dense(program.penalty) / one
    incumbent = search.least(counts, incumbent, HALF / one, nodes, exact)
    for cost in (time, program.dense(program.second_order)):
        scaled = cost * (SCALE / (float(cost @ incumbent) or 1.0))
        incumbent = search.least(scaled, incumbent, EQUAL_SECONDS * SCALE, nodes, exact)
    return incumbent


def _cheaper(search: Search, cost: np.ndarray, time: np.ndarray, incumbent: np.ndarray, most: float) -> np.ndarray:
    """An assignment within the time that costs no more than the incumbent, often the best: its cost and time together
    are least at the price of time that the bound has (Lagrange's multiplier), where few relaxations are fractional."""
    price = search.price(cost)
    for factor in PRICES if price else ():
        x = search.relaxed(cost + factor * price * time)
        if x is not None and time @ x <= most and cost @ x < cost @ incumbent:
            return x
    return incumbent
