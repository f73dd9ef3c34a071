"""Branch and bound over linear relaxations: exact, best bound first.

HiGHS solves the relaxations, each from its parent's basis. Here they are integral, or nearly so: all that makes them
fractional is a row that weighs choices against a limit of bytes. So branching on the heaviest such choice ends after a
few nodes (kimi_linear: 12 nodes, 0.4 s CPU), where the general solver's cuts and sub-problems took 24 s. In a large
program a node takes long. There an assignment is sought first, at the prices of these limits, and where it is near the
bound the general solver begins with it: 48 blocks that all differ took 1.2 CPU s so, and 17 by nodes alone.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import highspy
import numpy as np

Relaxed = tuple[np.ndarray, float]  # column values, and the objective there

Fixed = dict[int, int]  # column -> 0 or 1
ITERATIONS = 20_000  # of the simplex, from a basis that is near: ten times what the largest programs have taken
UNLIMITED = 2**31 - 1
OPTIONS = {"output_flag": False, "threads": 1, "mip_rel_gap": 1e-7, "mip_abs_gap": 1e-7}
INTEGRAL = 1e-6
ROUNDING = 1e-9  # of a row's limit
MAX_NODES = 150  # then the general solver takes over
MAX_QUICK_COLUMNS = 4_000  # of a larger one fewer nodes: each takes longer, and the general solver less than so many
NARROW = 0.01  # of the bound
PRICES = 1.0001, 1.3, 3.0  # times what a unit of a row is worth at the bound: assignments that are tried first


class Start(NamedTuple):
    """A place from which a search of the same rows goes on: the basis of another one, and columns fixed at 0."""

    basis: highspy.HighsBasis | None = None
    forbidden: Sequence[int] = ()


NOWHERE = Start()


@dataclass
class Search:
    """One program's search for its optimum.

    Attributes:
        model: the linear program; every column is in [0, 1].
        integer: indices of the columns that must be 0 or 1.
        weight: per column, what makes it worth deciding first.
        start: where it begins.
        savings: indices of columns that may also be a part of 1 in an assignment.
        limits: indices of the rows that limit bytes.
        deadline: the process's CPU seconds at which it stops with what it has, which is one assignment at least.
    """

    model: highspy.HighsLp
    integer: np.ndarray
    weight: np.ndarray
    start: Start = NOWHERE
    savings: np.ndarray = field(default_factory=lambda: np.empty(0, int))
    limits: Sequence[int] = ()
    deadline: float = np.inf

    def __post_init__(self) -> None:
        self.highs = _solver(self.model)
        self.highs.setOptionValue("simplex_iteration_limit", ITERATIONS)
        self.upper = np.ones(self.model.num_col_)
        self.scale = 1.0  # of the row last added
        self.forbid(self.start.forbidden)
        if self.start.basis is not None:
            self.highs.setBasis(self.start.basis)

    def run(self) -> tuple[np.ndarray, float, float] | None:
        """Column values, the optimum, and the bound proved for it; None where nothing is feasible."""
        root = self._relax({})
        if root is None:
            return None
        # Most relaxations are integral: nothing is to be sought.
        if self._branch(root[0]) is None:
            return root[0], root[1], root[1]
        # Hundreds of nodes of a large program take longer than the general solver that begins near the optimum.
        near, bound = self._near(root) if self.large else None, root[1]
        if near is None or not self._narrow(near[1], bound):
            bound, x = self._descend(np.inf, root)
            if x is not None:
                return x, bound, bound
            if bound == np.inf:
                return None
        # Without an assignment the general solver may take minutes to its first; of a large program it was sought.
        if not self.large:
            near = self._near(root)
        if near is not None and self.stopped:
            return *near, bound
        general = self._general(near and near[0])
        return None if general is None else (*general[:2], max(bound, general[2]))

    @property
    def large(self) -> bool:
        """Return whether a relaxation takes so long that the general solver should begin early."""
        return self.model.num_col_ > MAX_QUICK_COLUMNS

    def _narrow(self, cost: float, bound: float) -> bool:
        """Return whether an assignment is so near the bound that most columns are ruled out, and the general solver is
        done sooner than a search here."""
        return self.large and cost - bound <= NARROW * abs(bound)

    @property
    def stopped(self) -> bool:
        """Return whether the deadline has passed, so that nothing further is looked for."""
        return time.process_time() > self.deadline

    def reached(self) -> Start:
        """Return where another search may go on from what was solved last."""
        return self.start._replace(basis=self.highs.getBasis())

    def below(self, cost: np.ndarray, cutoff: float) -> tuple[float, np.ndarray | None]:
        """The lower bound of another objective, and an assignment below `cutoff` where there is one.

        Args:
            cost: the other objective, per column.
            cutoff: nothing is looked for above it; the bound is at most this.
        """
        self._minimise(cost)
        return self._descend(cutoff)

    def least(self, cost: np.ndarray, incumbent: np.ndarray, step: float, most: int, exact: bool) -> np.ndarray:
        """The assignment of the least cost; what costs more than that is ruled out of this search for good.

        Columns are ruled out by their reduced costs, which say what an assignment with them costs at least.

        Args:
            cost: per column.
            incumbent: an assignment, which is the answer where none is cheaper by `step`.
            step: the least difference that counts. most: nodes of the search, after which the general solver goes on;
                where it need not be `exact`, the incumbent stays.
        """
        root = None if self.stopped else self._root(cost)
        if root is None:
            return incumbent  # no seconds are left, or the rows hold for it by a rounding error
        bound, reduced = root[1], np.array(self.highs.getSolution().col_dual)
        best = float(cost @ incumbent)
        if best - bound >= step:
            self._rule_out(reduced, best - bound)
            # Near the bound the general solver is done sooner, but not than a node or two, which often are enough.
            few = most // 4 if self._narrow(best, bound) else most
            reached, x = self._descend(best - step, root, few)
            if x is None and reached < best - step and exact:
                general = self._general(incumbent)
                x = general[0] if general is not None and cost @ general[0] <= best - step else None
            incumbent = incumbent if x is None else _exact(x)
        self._rule_out(reduced, float(cost @ incumbent) - bound)
        self.add(cost, float(cost @ incumbent))
        return incumbent

    def add(self, terms: np.ndarray, most: float) -> None:
        """A further row: the sum of these terms is at most so much, rounding aside."""
        columns = np.flatnonzero(terms).astype(np.int32)
        self.scale = abs(most) or 1.0
        self.highs.addRow(-np.inf, most / self.scale + ROUNDING, len(columns), columns, terms[columns] / self.scale)

    def within(self, cost: np.ndarray, most: float) -> None:
        """A further row, as by `add`; columns that no assignment within it has are ruled out."""
        root = self._root(cost)
        if root is not None:
            self._rule_out(np.array(self.highs.getSolution().col_dual), most - root[1])
        self.add(cost, most)

    def _rule_out(self, reduced: np.ndarray, gap: float) -> None:
        """Fix at 0 the columns whose reduced cost exceeds the gap between an assignment and the bound."""
        beyond = (reduced > gap + INTEGRAL * (1 + gap)) & (self.upper > 0)
        beyond[self.savings] = False
        self.forbid(np.flatnonzero(beyond))

    def forbid(self, columns: Iterable[int]) -> None:
        """Fix columns at 0."""
        for column in columns:
            self.upper[column] = 0.0
            self.highs.changeColBounds(int(column), 0, 0)

    def relaxed(self, cost: np.ndarray) -> np.ndarray | None:
        """The optimum of the relaxation for another objective, where it is integral."""
        root = self._root(cost)
        return root[0] if root is not None and self._branch(root[0]) is None else None

    def price(self, cost: np.ndarray) -> float:
        """By how much the relaxation's optimum for an objective falls for each unit that the row last added gains."""
        self.relaxed(cost)
        duals = self.highs.getSolution().row_dual
        return -duals[-1] / self.scale if len(duals) else 0.0

    def _near(self, root: Relaxed) -> Relaxed | None:
        """An assignment near the optimum and its cost, in a few relaxations: limits of bytes make them fractional, so
        what these weigh is paid for, at the price that the first relaxation, `root`, has for it (Lagrange's
        multiplier). What costs more than this assignment is ruled out of this search."""
        if not self.limits:
            return None
        self._relax({})
        cost, solution, matrix = np.array(self.model.col_cost_), self.highs.getSolution(), self.model.a_matrix_
        reduced, duals, prices = np.array(solution.col_dual), solution.row_dual, np.zeros(len(cost))
        basis = self.highs.getBasis()
        for row in self.limits:
            terms = slice(matrix.start_[row], matrix.start_[row + 1])
            prices[matrix.index_[terms]] -= duals[row] * np.array(matrix.value_[terms])
        near = next((x for factor in PRICES if (x := self.relaxed(cost + factor * prices)) is not None), None)
        self._minimise(cost)
        self.highs.setBasis(basis)
        if near is None:
            return None
        self._rule_out(reduced, float(cost @ near) - root[1])
        return near, float(cost @ near)

    def _descend(
        self, cutoff: float, root: Relaxed | None = None, most: int = MAX_NODES
    ) -> tuple[float, np.ndarray | None]:
        """The lower bound, at most `cutoff`; and the best assignment below it, unless the search gave up."""
        order = itertools.count()
        root = root or self._relax({})
        most = int(most * min(1.0, MAX_QUICK_COLUMNS / self.model.num_col_) ** 2)
        queue = [(root[1], next(order), Fixed(), root[0], self.highs.getBasis())] if root else []
        while queue:
            bound, nodes, fixed, x, basis = heapq.heappop(queue)
            if bound >= cutoff:
                break
            column = self._branch(x)
            if column is None or nodes > most or self.stopped:
                return bound, x if column is None else None
            for value in (1, 0):
                below = {**fixed, column: value}
                self.highs.setBasis(basis)
                relaxed = self._relax(below)
                if relaxed and relaxed[1] < cutoff:
                    heapq.heappush(queue, (relaxed[1], next(order), below, relaxed[0], self.highs.getBasis()))
        return cutoff, None

    def _minimise(self, cost: np.ndarray) -> None:
        """Have another objective, from the basis that is there."""
        self.highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def _root(self, cost: np.ndarray) -> Relaxed | None:
        """The relaxation for another objective, as a search begins with it; None where that is infeasible."""
        self._minimise(cost)
        return self._relax({})

    def _relax(self, fixed: Fixed) -> Relaxed | None:
        """Column values and objective with some columns fixed; None where that is infeasible."""
        for column, value in fixed.items():
            self.highs.changeColBounds(column, value, value)
        self.highs.run()
        # Where the simplex does not come to an end from the basis that is there, it begins from none.
        if self.highs.getModelStatus() == highspy.HighsModelStatus.kIterationLimit:
            self.highs.clearSolver()
            self.highs.setOptionValue("simplex_iteration_limit", UNLIMITED)
            self.highs.run()
            self.highs.setOptionValue("simplex_iteration_limit", ITERATIONS)
        optimum = None
        if self.highs.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            optimum = np.array(self.highs.getSolution().col_value), self.highs.getInfo().objective_function_value
        for column in fixed:
            self.highs.changeColBounds(column, 0, self.upper[column])
        return optimum

    def _branch(self, x: np.ndarray) -> int | None:
        """The fractional column to decide next; None where all are integral."""
        away = np.minimum(x, 1 - x)[self.integer]
        if away.max(initial=0.0) <= INTEGRAL:
            return None
        heavy = away * self.weight[self.integer]
        return int(self.integer[np.argmax(heavy if heavy.max() > INTEGRAL else away)])

    def _general(self, incumbent: np.ndarray | None = None) -> tuple[np.ndarray, float, float] | None:
        """Solve by HiGHS's own branch and cut, from an assignment where there is one; until the deadline,
        or where nothing is found by then, until the first assignment."""
        model = self.highs.getLp()
        kinds = np.full(model.num_col_, highspy.HighsVarType.kContinuous)
        kinds[self.integer] = highspy.HighsVarType.kInteger
        model.integrality_ = list(kinds)
        highs = _solver(model)
        if incumbent is not None:
            start = highspy.HighsSolution()
            start.col_value = [*incumbent]
            highs.setSolution(start)
        if self.deadline < np.inf:  # its own limit is of the clock on the wall
            highs.cbMipInterrupt += lambda event: event.interrupt(self.stopped)
        highs.run()
        info, legal = highs.getInfo(), int(highspy.SolutionStatus.kSolutionStatusFeasible)
        if self.stopped and info.primal_solution_status != legal and incumbent is None:
            highs.cbMipInterrupt.clear()
            highs.setOptionValue("mip_max_improving_sols", 1)
            highs.run()
            info = highs.getInfo()
        if info.primal_solution_status != legal:
            return None
        return np.array(highs.getSolution().col_value), info.objective_function_value, info.mip_dual_bound


def _exact(x: np.ndarray) -> np.ndarray:
    """Column values without the solver's tolerance, which a row that holds the assignment to its cost would keep."""
    return np.where(np.abs(x - np.round(x)) <= INTEGRAL, np.round(x), x)


def _solver(model: highspy.HighsLp) -> highspy.Highs:
    highs = highspy.Highs()
    for option, value in OPTIONS.items():
        highs.setOptionValue(option, value)
    highs.passModel(model)
    return highs
