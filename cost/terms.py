"""A cost as a small vector of named terms, from an operator's price to the printed plan; and the memory of a rank.

Which names there are, and what each weighs in a step, is the table `TERMS`; `Objective.weights` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    "parameter_bytes": Term("B"),  # on the rank that has most, for decoding those of the cache too
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
        out = {}
        for cost in costs:
            for name, x in cost._terms.items():
                out[name] = out.get(name, 0.0) + x
        return cls(**out)


NOTHING = Cost()


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest rank holds.

    Attributes:
        parameters, buffers: of the rank's parts; buffers with the constants of the graph.
        gradients, states: of parameters, and the optimizer's (`Objective.optimizer`); 0 for inference.
        activations: what autograd keeps from the forward for the backward; 0 for inference.
        cache: what the program carries to the next call. Of a program that carries nothing, and is for inference: what
            the model's own call that begins a cache leaves of the example inputs; of a model that has none to ask for,
            keys and values as they enter every attention, but one in which every token sees every other.
        cache_token: by which the cache grows with each token of a sequence; `cache_sequence`: the part that does not
            grow, for each sequence.
        working: what lives at the fullest moment beside all that.
        peak: the sum; `phase`: "forward" or "backward", `at`: module and operator of the fullest moment.
        optimizer: whose states these are.
    """

    parameters: float = 0.0
    buffers: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    activations: float = 0.0
    cache: float = 0.0
    working: float = 0.0
    cache_token: float = 0.0
    cache_sequence: float = 0.0
    phase: str = "forward"
    at: str = ""
    optimizer: str = "adamw"

    @property
    def peak(self) -> float:
        return self.steady + self.activations + self.working

    @property
    def steady(self) -> float:
        """Bytes that are there whatever runs: all but activations and the working set."""
        return self.parameters + self.buffers + self.gradients + self.states + self.cache
