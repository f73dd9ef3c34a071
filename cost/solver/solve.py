"""The exact solver: an integer program in the flow form of directed Steiner trees, minimised in stages.

Data of the `Problem`, in the letters that follow:

    i, c    an item, one of its choices        n[i]          equal instances of the item, which share the choice
    u, d    a use of a value, one consumer     m[u]          equal instances of the use
    a, b    layouts                            w[u, a, b]    seconds to convert the used value from a to b
    T[c]    seconds of one instance            K[c]          penalty of its layouts, a count
    A[c]    activation bytes of one instance   P[c], M[c]    parameter bytes, bytes against the memory budget

Columns, all in [0, 1]:

    x[c] in {0, 1}   the choice is taken                                                            `add_items`
    y[u, a, b]       the conversion is paid; only pairs that can be converted have one              `add_conversions`
    f[u, d, a, b]    the consumer's flow over it; of a use with one consumer this is y itself       `add_use`

Rows:

    one choice       sum of x[c] over c of i == 1                                  each i           `add_items`
    no detour        sum of y[u, a, b] over a                                      each u, b        `no_detour`
                       <= sum of x[c] over consumers d of u and their c that read b
    paid once        f[u, d, a, b] <= y[u, a, b]                                   each u, d, a, b  `paid_once`
    flow             sum of x[c] over c that produce b, + sum of f[u, d, a, b] over a
                       == sum of x[c] over c with which d reads b
                        + sum of f[u, d, b, a] over a                              each u, d, b     `conserved`
    knapsack         sum of n[i] B[c] x[c] <= limit, B being P or M                                 `within`
    too large        x[c] == 0, where c and the least of every other item exceed the limit          `within`
    cover            sum of x[c] over c that take more than room / (k + 1) above the least of i <= k
                       room being what the limit leaves above the least of all     each k           `covers`

Stages, each with the knapsack of those before:

    memory           M* = min of sum n[i] M[c] x[c]: refuse where M* exceeds the budget, else M's knapsack   `_budget`
    parameters       P* = min of sum n[i] P[c] x[c]; then P's knapsack for each kind of weight: at most slack
                       times its part of P*, items of one choice excepted                           `_parameters`
    time             min of sum n[i] T[c] x[c] + sum m[u] w[u, a, b] y[u, a, b] + tie * S           `_cheapest`
    proof            min of the same without S, from the last basis, below the seconds that were found       `_cheapest`
    band             where one is asked for: of what takes little longer the plainest (`band.py`)              `_banded`

A band is at most as wide as the plan that the problem is held against allows (`_banded`): that plan is solved with the
choices that it rules out at 0, by the same stages.

Plans of equal seconds are compared by S, a weighted sum and no order of its own:

    S = sum of n[i] (ACTIVATIONS A[c] / A* + PARTITIONS K[c]) x[c] + sum of CONVERSIONS m[u] (1 + k / uses) y[u, a, b]

with A* the most activations that the items' choices come to, and k the position of u among the uses. So activations
come first (a ten-millionth of A* weighs as much as a penalty of one), then the simpler partitions (`penalty` of
`passes/shard/strategies.py`), then fewer conversions, then conversions of values that are made early. `tie` is at most
`TIE` of the seconds of a typical plan, and is lowered until the proof says that S has cost no seconds.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autotp.errors import PlanError
from autotp.ir.program import Solution
from autotp.text import amount

from .band import plainest
from .integer_program import IntegerProgram, Optimum, Terms, total
from .problem import Item, Problem, traffic
from .rows import MICRO, Picks, build, within
from .search import Start

TIE = 1e-5  # of the seconds: what the second order may weigh in all
LEAST_TIE = 1e-12  # and below it ties are not broken
SECONDS = 60.0  # of the CPU, after which the best plan so far is returned with its bound
SLACK = 1.03  # room for norms and biases; at 1.1 the attention of a small mixture of experts stayed whole
EXACT = 1e-9  # of the seconds: what counts as equal
INTEGER_TOLERANCE = 1e-5  # of a column that is 0 or 1
MAX_NAMED_ITEMS = 5  # items that the error names where nothing fits


class Infeasible(PlanError):
    """No legal assignment exists."""


def solve(problem: Problem, slack: float = SLACK, band: float | None = None, seconds: float = np.inf) -> Solution:
    """Choose for every item.

    Args:
        problem: items, uses and conversion costs, in seconds and bytes.
        slack: parameters per rank may exceed the least possible by this factor, except those that leave no choice.
        band: share of the least seconds that a plan may take longer to send less; None: only seconds count.
        seconds: of the CPU, after which no better plan is looked for, half of them for the least seconds and the rest
            for the band. The least bytes are found and one plan is made whatever it takes.

    Returns:
        The choices with the optimum in seconds, the lower bound that was proved for it, and bytes per rank.

    Raises:
        Infeasible: no legal assignment exists. PlanError: none fits into the problem's limit.
    """
    began = time.process_time()
    program, picks = build(problem)
    if problem.limit is not None:
        _budget(problem, program, picks, problem.limit)
    least = _parameters(problem, program, picks, slack)
    program.deadline = began + seconds / 2  # the rest is for the band
    x, bound, start = _cheapest(program, TIE if band is None else 0.0)
    best = replace(_solution(problem, program, picks, x), bound=bound / MICRO, least_parameter_bytes=least)
    stopped = time.process_time() > program.deadline
    program.deadline = began + seconds
    if band is not None:
        best = _banded(problem, program, picks, (best, x, start), band)
    return replace(best, stopped_after=seconds if stopped or time.process_time() > program.deadline else None)


def _solution(problem: Problem, program: IntegerProgram, picks: Picks, x: np.ndarray) -> Solution:
    """Return what these column values say."""
    choices = tuple(max(range(len(p)), key=lambda k, p=p: x[p[k]]) for p in picks)
    whole = np.round(x)
    # What is not whole by a rounding error is so by the rows' tolerance.
    seconds = total(program.microseconds, np.where(np.abs(x - whole) < INTEGER_TOLERANCE, whole, x)) / MICRO
    sends = traffic(problem, choices)
    return Solution(
        choices, seconds, 0.0, 0.0,
        parameter_bytes=total(program.parameter_bytes, whole),
        budget_bytes=total(program.budget_bytes, whole),
        least_seconds=seconds, sent_bytes=sends.bytes, collectives=sends.collectives,
    )  # fmt: skip


def feasible(problem: Problem) -> None:
    """Raise `Infeasible` where no legal assignment exists, whatever it costs."""
    program, _ = build(problem)
    _minimise(program, {}, "at any cost")


# the stages


ColumnSolution = tuple[Solution, np.ndarray, Start]  # and its column values, and where they were found


def _banded(problem: Problem, program: IntegerProgram, picks: Picks, fastest: ColumnSolution, band: float) -> Solution:
    """The plainest plan that is at most `band` slower than the fastest one, and never slower than a rival.

    Where a rival is not within the band, the plan stays faster than it by more than the band.
    """
    first, x, start = fastest
    most = first.seconds * MICRO * (1 + band)
    rival, rival_x = _rival(problem, program, picks, start, band) or (None, x)
    if rival is not None:
        theirs = rival.seconds * MICRO
        x, most = (rival_x, theirs) if theirs <= most else (x, min(most, theirs / (1 + band)))
    best = _solution(problem, program, picks, plainest(program, start, x, most))
    least = first.least_parameter_bytes
    return replace(best, bound=first.bound, least_parameter_bytes=least, least_seconds=first.seconds, rival=rival)


def _rival(
    problem: Problem, program: IntegerProgram, picks: Picks, start: Start, band: float
) -> tuple[Solution, np.ndarray] | None:
    """The best of the plans that this one is held against, and its column values; None where none of them is legal.

    Args:
        problem, program, picks: with the rows of all stages before, which count for rivals too.
        start: where the fastest plan was found.
    """
    solutions = []
    for ruled_out in problem.rivals:
        restricted = start._replace(forbidden=[picks[i][k] for i, k in sorted(ruled_out)])
        fastest = program.minimise(program.microseconds, restricted)
        if fastest is not None:
            x = plainest(program, fastest.search.reached(), fastest.x, fastest.value * (1 + band))
            solutions.append((_solution(problem, program, picks, x), x))
    within_band = min((rival.seconds for rival, _ in solutions), default=0.0) * (1 + band)
    near = [pair for pair in solutions if pair[0].seconds <= within_band]
    return min(near, key=lambda pair: (pair[0].sent_bytes, pair[0].seconds), default=None)


def _minimise(program: IntegerProgram, objective: Terms, what: str) -> Optimum:
    optimum = program.minimise(objective)
    if optimum is None:
        raise Infeasible(f"no legal plan exists ({what}): the operators' rules leave no assignment that fits")
    return optimum


def _budget(problem: Problem, program: IntegerProgram, picks: Picks, limit: float) -> None:
    """Add the rows of a memory budget.

    Raises:
        PlanError: nothing fits; it says how much the leanest plan takes, and of what.
    """
    x, least, *_ = _minimise(program, program.budget_bytes, "least memory")
    if least > limit:
        raise PlanError(
            f"no plan fits into memory={amount(limit)} per rank: the leanest legal one holds {amount(least)}, "
            f"its working set not counted. Its largest parts are:{_largest(problem, picks, x)}\n"
            "Give more memory, more ranks (tp), a smaller batch, or drop pins."
        )
    sizes = [_bytes_of(item, "budget_bytes", item.count) for item in problem.items]
    if sum(map(max, sizes)) > limit:  # one that rules nothing out leaves the program, and so the plan, as it is
        program.limit(within(sizes, program.budget_bytes, picks, limit))


def _bytes_of(item: Item, name: str, count: int) -> list[float]:
    """These bytes of each choice, over so many of the item's nodes."""
    return [getattr(choice, name) * count for choice in item.choices]


def _largest(problem: Problem, picks: Picks, x: np.ndarray) -> str:
    """The items that take most of the budget, a line each."""
    parts = []
    for item, columns in zip(problem.items, picks, strict=True):
        choice = item.choices[int(np.argmax(x[columns]))]
        parts.append((choice.budget_bytes * item.count, item))
    parts.sort(key=lambda part: -part[0])
    lines = ""
    for size, item in parts[:MAX_NAMED_ITEMS]:
        times = f" x {item.count}" if item.count > 1 else ""
        lines += f"\n  {item.label or item.name}{times}: {amount(size)}"
    return lines


def _parameters(problem: Problem, program: IntegerProgram, picks: Picks, slack: float) -> float:
    """The least bytes of parameters on a rank; adds the rows that keep the plan within `slack` of them."""
    if all(len(item.choices) == 1 for item in problem.items if any(_bytes_of(item, "parameter_bytes", 1))):
        return sum(item.choices[0].parameter_bytes * item.count for item in problem.items)
    x, least, *_ = _minimise(program, program.parameter_bytes, "fewest parameters per rank")
    # Items with one choice take no part in the slack: a large table that no rule can split would leave room to hold
    # all norms and every small projection whole. A table that splits would too, so each kind has a slack of its own.
    for kind in dict.fromkeys(item.kind for item in problem.items):
        sizes = [_bytes_of(item, "parameter_bytes", item.count * (item.kind == kind)) for item in problem.items]
        terms = {}
        for columns, choice_sizes in zip(picks, sizes, strict=True):
            terms |= zip(columns, choice_sizes, strict=True)
        fixed = sum(choice_sizes[0] for choice_sizes in sizes if len(choice_sizes) == 1)
        limit = fixed + (total(terms, np.round(x)) - fixed) * slack + 0.5
        if any(terms.values()):
            program.limit(within(sizes, terms, picks, limit))
    return least


def _cheapest(program: IntegerProgram, tie: float) -> tuple[np.ndarray, float, Start]:
    """Column values of the least seconds, ties broken by the second order; the bound proved for the seconds; and where
    they were found."""
    cost = program.dense(program.microseconds)
    while True:
        x, _, proved, search = _minimise(program, _with_ties(program, tie), "least time")
        best = float(cost @ x)
        if tie == 0 and proved >= best * (1 - EXACT):
            return x, best, search.reached()
        # Two plans that differ by less than the second order weighs would be swapped: a conversion of a microsecond
        # in a step of a second is that little. So the seconds alone are asked whether anything is below.
        bound, better = search.below(cost, best * (1 - EXACT))
        if better is None or tie == 0:
            # at the cutoff: nothing is cheaper by more than rounding
            bound = max(bound, proved) if tie == 0 else bound
            return x, best if bound >= best * (1 - EXACT) else bound, search.reached()
        tie = tie / 100 if tie > LEAST_TIE else 0.0


def _with_ties(program: IntegerProgram, tie: float) -> Terms:
    """Microseconds, and ties broken by the second order: at most `tie` of those of a typical plan in all."""
    typical = sum(abs(x) for x in program.microseconds.values()) / 10
    most = sum(abs(x) for x in program.second_order.values()) or 1.0
    weight = tie * typical / most
    columns = {*program.microseconds, *program.second_order}
    return {i: program.microseconds.get(i, 0.0) + weight * program.second_order.get(i, 0.0) for i in columns}
