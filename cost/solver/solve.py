"""The exact solver: a mixed-integer program in the tight flow form.

Three stages in lexicographic order: the least parameters per rank that any legal plan reaches; the least seconds within
a slack of that; then least saved activations and the simplest partitions. A memory budget goes before all of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import highspy
import numpy as np

from autotp.errors import PlanError
from autotp.ir.layouts import Layout
from autotp.ir.program import Solution
from autotp.text import amount

from .problem import Problem, Use
from .search import Search

Terms = dict[int, float]
Row = tuple[Terms, float, float]
TIE = 1e-5  # of the seconds: what the second order may weigh in all
SLACK = 1.03  # room for norms and biases; at 1.1 the attention of a small mixture of experts stayed whole
EXACT = 1e-9  # of the seconds: what counts as equal
MICRO = 1e6  # seconds -> microseconds, so that HiGHS' absolute tolerances are far below what matters


class Infeasible(PlanError):
    """No legal assignment exists."""


@dataclass
class IntegerProgram:
    """Columns, rows and the objectives of the integer program."""

    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seconds: Terms = field(default_factory=dict)
    saved: Terms = field(default_factory=dict)
    stored: Terms = field(default_factory=dict)
    held: Terms = field(default_factory=dict)

    def column(self, integer: bool) -> int:
        self.integer.append(integer)
        return len(self.integer) - 1

    def minimise(self, objective: Terms, what: str) -> tuple[np.ndarray, float, Search]:
        """Column values, the optimum, and the search that found it."""
        weight = np.zeros(len(self.integer))
        for terms in (self.stored, self.held):
            weight[list(terms)] += list(terms.values())
        search = Search(self._model(objective), np.flatnonzero(self.integer), weight)
        found = search.run()
        if found is None:
            raise Infeasible(f"no legal plan exists ({what}): the operators' rules leave no assignment that fits")
        return found[0], found[1], search

    def costs(self, objective: Terms) -> np.ndarray:
        return np.array([objective.get(i, 0.0) for i in range(len(self.integer))])

    def _model(self, objective: Terms) -> highspy.HighsLp:
        n, lp = len(self.integer), highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n, len(self.rows)
        lp.col_cost_ = self.costs(objective)
        lp.col_lower_, lp.col_upper_ = np.zeros(n), np.ones(n)
        lp.row_lower_, lp.row_upper_ = (np.array([r[k] for r in self.rows], float) for k in (1, 2))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([i for terms, _, _ in self.rows for i in terms], np.int32)
        lp.a_matrix_.value_ = np.array([x for terms, _, _ in self.rows for x in terms.values()], float)
        return lp


def solve(problem: Problem, slack: float = SLACK) -> Solution:
    """Choose for every item.

    Args:
        problem: items, uses and conversion costs.
        slack: parameters per rank may exceed the least possible by this factor, those apart that leave no choice.

    Returns:
        The choices with the optimum in seconds, the lower bound that was proved for it, and bytes per rank.

    Raises:
        Infeasible: no legal assignment exists. PlanError: none fits into the problem's limit.
    """
    program, picks = _build(problem)
    if problem.limit is not None:
        _budget(problem, program, picks, problem.limit)
    least = 0.0
    if any(program.stored.values()):
        x, least, _ = program.minimise(program.stored, "fewest parameters per rank")
        fixed = sum(i.choices[0].stored * i.count for i in problem.items if len(i.choices) == 1)
        terms = [[c.stored * i.count for c in i.choices] for i in problem.items]
        program.rows += _within(terms, program.stored, picks, fixed + (least - fixed) * slack + 0.5)
    x, bound = _cheapest(program)
    chosen = tuple(max(range(len(p)), key=lambda k, p=p: x[p[k]]) for p in picks)
    stored, held = (_sum(terms, np.round(x)) for terms in (program.stored, program.held))
    return Solution(chosen, _sum(program.seconds, x) / MICRO, bound / MICRO, least, stored, held)


def feasible(problem: Problem) -> None:
    """Raise `Infeasible` where no legal assignment exists, whatever it costs."""
    program, _ = _build(problem)
    program.minimise({}, "at any cost")


def _cheapest(program: IntegerProgram) -> tuple[np.ndarray, float]:
    """Column values of the least seconds, ties broken by the second order; and the bound proved for the seconds."""
    tie, cost = TIE, program.costs(program.seconds)
    while True:
        x, _, search = program.minimise(_with_ties(program, tie), "least time")
        best = float(cost @ x)
        bound, better = search.below(cost, best * (1 - EXACT))
        if better is None or tie == 0:
            # at the cutoff: nothing is cheaper by more than rounding
            return x, best if bound >= best * (1 - EXACT) else bound
        tie = tie / 100 if tie > 1e-12 else 0.0


def _budget(problem: Problem, program: IntegerProgram, picks: list[list[int]], limit: float) -> None:
    """Add the rows of a memory budget.

    Raises:
        PlanError: nothing fits; it says how much the leanest plan holds, and of what.
    """
    x, least, _ = program.minimise(program.held, "least memory")
    if least > limit:
        chosen = [
            max(zip(x[p], i.choices, strict=True), key=lambda got: got[0])[1]
            for i, p in zip(problem.items, picks, strict=True)
        ]
        parts = sorted(((c.held * i.count, i) for c, i in zip(chosen, problem.items, strict=True)), key=lambda p: -p[0])
        told = "".join(
            f"\n  {i.label or i.name}{f' x {i.count}' if i.count > 1 else ''}: {amount(n)}" for n, i in parts[:5]
        )
        raise PlanError(
            f"no plan fits into memory={amount(limit)} per rank: the leanest legal one holds {amount(least)}, "
            f"its working set apart. Its largest parts are:{told}\n"
            "Give more memory, more ranks (tp), a smaller batch, or drop pins."
        )
    terms = [[c.held * i.count for c in i.choices] for i in problem.items]
    program.rows += _within(terms, program.held, picks, limit)


def _within(terms: list[list[float]], total: Terms, picks: list[list[int]], limit: float) -> list[Row]:
    """Rows for at most `limit` bytes, of which `terms` has what each choice of each item comes to.

    One knapsack row says it. Its relaxation would leave every large parameter whole by a fraction, so choices that are
    too large even when all others are at their least are ruled out one by one.
    """
    counted = [(i, held) for i, held in enumerate(terms) if any(held)]
    least = sum(min(held) for _, held in counted)
    rows: list[Row] = [(total, 0.0, limit)]
    for i, held in counted:
        room = limit - (least - min(held))
        rows += [({column: 1.0}, 0, 0) for column, n in zip(picks[i], held, strict=True) if n > room]
    return rows


def _with_ties(program: IntegerProgram, tie: float) -> Terms:
    """Seconds, and ties broken by the second order: at most `tie` of the seconds of a typical plan in all."""
    typical = sum(abs(x) for x in program.seconds.values()) / 10
    most = sum(abs(x) for x in program.saved.values()) or 1.0
    weight = tie * typical / most
    return {
        i: program.seconds.get(i, 0.0) + weight * program.saved.get(i, 0.0) for i in {*program.seconds, *program.saved}
    }


def _sum(terms: Terms, x: np.ndarray) -> float:
    return float(sum(v * x[i] for i, v in terms.items()))


def _build(problem: Problem) -> tuple[IntegerProgram, list[list[int]]]:
    program, picks = IntegerProgram(), []
    makes: dict[object, dict[Layout, list[int]]] = {}
    most = sum(max(c.saved for c in i.choices) * i.count for i in problem.items) or 1.0
    for item in problem.items:
        columns = [program.column(True) for _ in item.choices]
        picks.append(columns)
        program.rows.append((dict.fromkeys(columns, 1.0), 1, 1))
        for i, choice in zip(columns, item.choices, strict=True):
            program.seconds[i] = choice.seconds * item.count * MICRO
            program.saved[i] = (1e4 * choice.saved / most + 1e-3 * choice.penalty) * item.count
            program.stored[i] = choice.stored * item.count
            program.held[i] = choice.held * item.count
            for value, layout in zip(item.outs, choice.outs, strict=True):
                makes.setdefault(value, defaultdict(list))[layout].append(i)
    for i, use in enumerate(problem.uses):
        late = 1 + i / len(problem.uses)  # of equal plans, the one that converts early
        _flow(problem, program, picks, makes[use.value], use, late)
    return program, picks


def _flow(
    problem: Problem,
    program: IntegerProgram,
    picks: list[list[int]],
    makes: dict[Layout, list[int]],
    use: Use,
    late: float,
) -> None:
    """Ship the value from the layout that is produced to the one that each consumer wants.

    Every consumer has a flow of its own over the conversions; a conversion is paid once, at its largest flow. This is
    the multi-commodity form of a directed Steiner tree, whose relaxation is nearly always integral here.
    """
    wants: dict[tuple[int, int], dict[Layout, list[int]]] = {}
    for item, slot in use.consumers:
        wanted = wants.setdefault((item, slot), defaultdict(list))
        for column, choice in zip(picks[item], problem.items[item].choices, strict=True):
            wanted[choice.ins[slot]].append(column)
    targets = list(dict.fromkeys(x for wanted in wants.values() for x in wanted))
    arcs: list[tuple[Layout, Layout, float]] = []
    for a, b in itertools.product(dict.fromkeys([*makes, *targets]), targets):
        seconds = problem.convert(use.value, a, b) if a != b else None
        if seconds is not None:
            arcs.append((a, b, seconds * use.count * MICRO))
    paid = [program.column(False) for _ in arcs]
    for column, (_, _, price) in zip(paid, arcs, strict=True):
        program.seconds[column] = price
        program.saved[column] = 1e-4 * use.count * late
    for layout in targets:  # what nobody wants is not made on the way: a plan's program would not make it either
        into = {column: 1.0 for column, (_, b, _) in zip(paid, arcs, strict=True) if b == layout}
        if into:
            asked = [i for wanted in wants.values() for i in wanted.get(layout, ())]
            program.rows.append((into | dict.fromkeys(asked, -1.0), -np.inf, 0))
    for wanted in wants.values():
        flow = paid if len(wants) == 1 else [program.column(False) for _ in arcs]
        for f, w in zip(flow, paid, strict=True):
            if f != w:
                program.rows.append(({f: 1.0, w: -1.0}, -np.inf, 0))
        for layout in dict.fromkeys([*makes, *targets]):
            balance = dict.fromkeys(makes.get(layout, ()), 1.0)
            for i in wanted.get(layout, ()):  # an item of a repeated block may consume what its twin makes
                balance[i] = balance.get(i, 0.0) - 1.0
            for f, (a, b, _) in zip(flow, arcs, strict=True):
                if layout in (a, b):
                    balance[f] = 1.0 if b == layout else -1.0
            program.rows.append((balance, 0, 0))
