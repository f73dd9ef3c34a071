"""A cost as a small vector of named terms, from an operator's price to the printed plan.

Which names there are, and what each weighs in a step, is the table `TERMS`; `Objective.weights` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Term(NamedTuple):
    """A term of a cost.

    Attributes:
        unit: "s" or "B".
        step: its weight in the seconds of a step.
        objectives: in which it has that weight; () for all.
    """

    unit: str
    step: float = 0.0
    objectives: tuple[str, ...] = ()


TERMS = {
    "compute": Term("s", 1.0),  # arithmetic or memory traffic of kernels, whichever takes longer
    "launches": Term("s", 1.0),  # of kernels
    "communication": Term("s", 1.0),  # over tp, each collective alone
    "hidden": Term("s", -1.0),  # communication over tp that runs beside products
    "bucketed": Term("s", -1.0, ("training",)),  # starts of all-reduces that are sent as one
    "regathering": Term("s", 1.0, ("training",)),  # of values that were not kept, that no product hides
    "optimizer": Term("s", 1.0, ("training",)),  # memory traffic of its step
    "waiting": Term("s", 1.0),  # for what dp sends and the backward does not hide
    "surcharge": Term("s", 1.0),  # of a mesh axis, for what it does not want
    "regathered_bytes": Term("B"),  # that a rank sends for that
    "activation_bytes": Term("B"),  # that autograd saves for the backward
    "parameter_bytes": Term("B"),  # on the rank that has most
    "budget_bytes": Term("B"),  # that count against the memory budget
}


class Cost(Mapping[str, float]):
    """Amounts by the names of their terms; a term that is not there is 0. Costs add, and scale by a number.

    Args:
        terms: name -> amount, in the term's unit.
    """

    __slots__ = ("_terms",)

    def __init__(self, **terms: float) -> None:
        self._terms = terms

    def __getitem__(self, name: str) -> float:
        return self._terms.get(name, 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __hash__(self) -> int:
        return hash(frozenset(self._terms.items()))

    def __add__(self, other: Cost) -> Cost:
        return Cost.total((self, other))

    def __mul__(self, times: float) -> Cost:
        return Cost(**{name: times * x for name, x in self._terms.items()})

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"Cost({', '.join(f'{name}={x:g}' for name, x in self._terms.items())})"

    def weighted(self, weights: Mapping[str, float]) -> float:
        """The sum of all terms, each times its weight; a name without a weight counts nothing."""
        return sum(weights.get(name, 0.0) * x for name, x in self._terms.items())

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """The sum of costs, term by term."""
        out: dict[str, float] = {}
        for cost in costs:
            for name, x in cost._terms.items():
                out[name] = out.get(name, 0.0) + x
        return cls(**out)


NOTHING = Cost()
