"""The linear model of an integer program: columns, rows and objectives, handed to HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import highspy
import numpy as np

from .search import NOWHERE, Search, Start

Terms = dict[int, float]  # column -> coefficient


class Row(NamedTuple):
    """`lower <= sum of terms <= upper`."""

    terms: Terms
    lower: float
    upper: float


class Optimum(NamedTuple):
    """Column values, the value there, the bound that was proved, and the search that can go on from its last basis."""

    x: np.ndarray
    value: float
    bound: float
    search: Search


@dataclass
class IntegerProgram:
    """Columns in [0, 1], rows, and the objectives that the stages take turns with.

    Attributes:
        integer: per column, whether it must be 0 or 1.
        rows: the constraints, in the order in which they were added.
        microseconds: of a step, per column.
        second_order: what breaks ties of the time, per column; no unit.
        parameter_bytes: bytes of parameters on a rank, per column.
        budget_bytes: bytes that count against the memory budget, per column.
        sent_bytes, collectives: what a rank sends, per column.
        penalty: of a leaf's partition, above its plainest one, per column; `most_penalty`: what they come to at most.
        limits: indices of the rows that limit bytes. deadline: of its searches, in CPU seconds of the process.
    """

    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    microseconds: Terms = field(default_factory=dict)
    second_order: Terms = field(default_factory=dict)
    parameter_bytes: Terms = field(default_factory=dict)
    budget_bytes: Terms = field(default_factory=dict)
    sent_bytes: Terms = field(default_factory=dict)
    collectives: Terms = field(default_factory=dict)
    penalty: Terms = field(default_factory=dict)
    most_penalty: float = 0.0
    limits: list[int] = field(default_factory=list)
    deadline: float = np.inf

    def column(self, integer: bool) -> int:
        """The index of a new column."""
        self.integer.append(integer)
        return len(self.integer) - 1

    def minimise(self, objective: Terms, start: Start = NOWHERE) -> Optimum | None:
        """The optimum of one objective; None where no assignment satisfies the rows."""
        # Rows of bytes are what makes a relaxation fractional, so the search decides heavy choices first.
        search = self.search(objective, self.dense(self.parameter_bytes) + self.dense(self.budget_bytes), start)
        result = search.run()
        return None if result is None else Optimum(*result, search)

    def search(self, objective: Terms, weight: np.ndarray, start: Start = NOWHERE) -> Search:
        """A search for the optimum of one objective, which decides columns of large weight first."""
        savings = np.flatnonzero(self.dense(self.microseconds) < 0)
        integer = np.flatnonzero(self.integer)
        return Search(self._model(objective), integer, weight, start, savings, self.limits, self.deadline)

    def limit(self, rows: list[Row]) -> None:
        """Add the rows of a limit of bytes; the first one is the sum itself."""
        self.limits.append(len(self.rows))
        self.rows += rows

    def dense(self, objective: Terms) -> np.ndarray:
        """An objective with a coefficient for every column."""
        coefficients = np.zeros(len(self.integer))
        coefficients[list(objective)] = list(objective.values())
        return coefficients

    def _model(self, objective: Terms) -> highspy.HighsLp:
        n, lp = len(self.integer), highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n, len(self.rows)
        lp.col_cost_ = self.dense(objective)
        lp.col_lower_, lp.col_upper_ = np.zeros(n), np.ones(n)
        lp.row_lower_ = np.array([row.lower for row in self.rows], float)
        lp.row_upper_ = np.array([row.upper for row in self.rows], float)
        columns = [i for row in self.rows for i in row.terms]
        coefficients = [x for row in self.rows for x in row.terms.values()]
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row.terms) for row in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array(columns, np.int32)
        lp.a_matrix_.value_ = np.array(coefficients, float)
        return lp


def total(terms: Terms, x: np.ndarray) -> float:
    """The value of an objective at these column values."""
    return float(sum(v * x[i] for i, v in terms.items()))
