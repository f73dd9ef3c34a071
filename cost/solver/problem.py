"""The decision problem as data: items with choices, values with groups of consumers. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import networkx as nx

from autotp.cost.terms import NOTHING, Cost
from autotp.ir.layouts import Distribution, Layout, SlotLayouts

from .savings import Saving

CACHE = "cache"  # kind of the items that hold what is kept for the next call
ValueId = Hashable
Step = tuple[int, int]
Price = Callable[[ValueId, Layout, Layout], Cost | None]


@dataclass(frozen=True)
class Choice:
    """One legal way to run an item: a layout per operand slot and per result, and what it costs one instance.

    The numbers are what a stage of the solver minimises: `cost`, term by term, under the weights of that stage.
    """

    ins: SlotLayouts
    outs: SlotLayouts
    seconds: float = 0.0
    activation_bytes: float = 0.0  # that autograd saves for the backward
    parameter_bytes: float = 0.0  # on the rank that has most, for decoding those of the cache too
    budget_bytes: float = 0.0  # that count against the memory budget
    penalty: int = 0  # breaks ties: segments, repetition, unevenness
    factor: int | None = None  # index of the split factor in the operator's rule
    loop: Distribution | None = None  # which part of that factor's loop each rank has
    cost: Cost = NOTHING

    @classmethod
    def of(cls, ins: SlotLayouts, outs: SlotLayouts, cost: Cost, seconds: float, penalty: int) -> Choice:
        """The choice with its numbers from a cost.

        Args:
            ins, outs: its layouts. cost: of one instance.
            seconds: what the objective's weights make of it. penalty: of its layouts.
        """
        sizes = (cost["activation_bytes"], cost["parameter_bytes"], cost["budget_bytes"])
        return cls(ins, outs, seconds, *sizes, penalty, cost=cost)


@dataclass
class Item:
    """An operator, a leaf, or the output: `count` equal instances that share one choice. `label` says it in words."""

    name: str
    choices: list[Choice]
    ins: list[frozenset[ValueId]] = field(default_factory=list)
    outs: list[ValueId] = field(default_factory=list)
    count: int = 1
    label: str = ""
    kind: str = "weights"  # weights of other kinds have a slack of their own


@dataclass(frozen=True)
class Use:
    """`count` instances of a value whose consumers are these (item index, slot)."""

    value: ValueId
    consumers: tuple[tuple[int, int], ...]
    count: int


class Traffic(NamedTuple):
    """Amounts that are sent: bytes of a rank, and the number of collectives."""

    bytes: float = 0.0
    collectives: int = 0


@dataclass
class Problem:
    """Minimise the items' and the conversions' seconds; a conversion is paid once per value and layout.

    A value passes only through layouts that some consumer wants. `limit`: bytes that all that is held may come to;
    `savings`: what the step is shorter by than the sum.
    `traffic`: what a rank sends for a conversion, by which the solver chooses among plans within a band of the least
    seconds.
    `rivals`: plans that this one is held against, each by the choices (item, choice) that it rules out.
    """

    items: list[Item]
    uses: list[Use]
    convert: Callable[[ValueId, Layout, Layout], float | None]  # seconds of a conversion, None where there is none
    limit: float | None = None
    savings: Sequence[Saving] = ()
    traffic: Callable[[ValueId, Layout, Layout], Traffic] = lambda value, source, target: Traffic()
    rivals: tuple[frozenset[tuple[int, int]], ...] = ()

    @property
    def leanest(self) -> float:
        """Bytes that no assignment holds less than."""
        total = 0.0
        for item in self.items:
            total += min(choice.budget_bytes for choice in item.choices) * item.count
        return total


def conversions(
    produced: Layout, targets: Set[Layout], cost: Callable[[Layout, Layout], float | None]
) -> list[tuple[Layout, Layout]] | None:
    """The cheapest set of conversions from one layout to all wanted ones, through wanted ones where that is cheaper.

    This is a minimum arborescence (Edmonds 1967). Taking the nearest layout again and again is not always the cheapest:
    with P to S for 2, P to I for 3, I to S for 1 and S to I for 9 it takes S first and pays 5, where I first costs 4.

    Args:
        produced: the layout that is there.
        targets: the layouts that consumers read.
        cost: seconds of a conversion; None where there is none.

    Returns:
        (from, to) in an order in which each source exists already; None where a layout cannot be reached.
    """
    # By name, so that all ranks insert the same conversions: the order of a set is another in every process.
    layouts = [produced, *sorted(targets - {produced}, key=repr)]
    arcs = {}
    for j, target in enumerate(layouts[1:], 1):
        # From every layout that is wanted, not from the produced one alone: in the example S comes from I for 1, from P
        # for 2.
        for i, source in enumerate(layouts):
            seconds = cost(source, target) if i != j else None
            if seconds is not None:
                arcs[i, j] = seconds
    steps = _nearest(len(layouts), arcs)
    if steps is None:
        return None
    if len(layouts) > 2:
        graph = nx.DiGraph()
        graph.add_weighted_edges_from((i, j, c) for (i, j), c in arcs.items())
        best = sorted(nx.minimum_spanning_arborescence(graph).edges)
        # Of equal sets the nearest one's order stays: conversions that others read come early.
        nearest = sum(arcs[step] for step in steps)
        if sum(arcs[step] for step in best) < nearest * (1 - 1e-12):
            steps = _ordered(best)
    return [(layouts[i], layouts[j]) for i, j in steps]


def traffic(problem: Problem, choices: Sequence[int]) -> Traffic:
    """Return what a rank sends under an assignment, by the conversions that its program takes.

    Args:
        problem: the items. choices: the index of each one's choice.
    """
    nbytes, calls = 0.0, 0
    for _, use, step in conversions_of(problem, choices):
        use_traffic = problem.traffic(use.value, *step)
        nbytes, calls = nbytes + use_traffic.bytes * use.count, calls + use_traffic.collectives * use.count
    return Traffic(nbytes, calls)


def cost_of(problem: Problem, choices: Sequence[int], price: Price) -> Cost:
    """The terms of all items and conversions, whose weighted sum is the seconds that the solver minimised.

    Args:
        problem: items, uses and conversions. choices: index of each item's choice.
        price: the terms of a conversion; None where there is none.
    """
    picks = [item.choices[k] for item, k in zip(problem.items, choices, strict=True)]
    item_costs = (choice.cost * item.count for choice, item in zip(picks, problem.items, strict=True))
    conversion_uses = {(k, *step): use for k, use, step in conversions_of(problem, choices)}
    conversion_costs = ((price(use.value, a, b) or NOTHING) * use.count for (_, a, b), use in conversion_uses.items())
    choice_keys = {(i, choice.ins, choice.outs) for i, choice in enumerate(picks)}
    savings = (Cost(**{s.name: s.seconds(conversion_uses, choice_keys)}) for s in problem.savings)
    return Cost.total([*item_costs, *conversion_costs, *savings])


def conversions_of(problem: Problem, choices: Sequence[int]) -> Iterator[tuple[int, Use, tuple[Layout, Layout]]]:
    """The conversions of an assignment, with number and data of the use whose value each converts; arguments as of
    `traffic`."""
    picks = [item.choices[k] for item, k in zip(problem.items, choices, strict=True)]
    producers = {}
    for item, choice in zip(problem.items, picks, strict=True):
        producers.update(zip(item.outs, choice.outs, strict=True))
    for k, use in enumerate(problem.uses):
        targets = {picks[i].ins[slot] for i, slot in use.consumers}
        for step in conversions(producers[use.value], targets, partial(problem.convert, use.value)) or ():
            yield k, use, step


def _nearest(count: int, arcs: Mapping[Step, float]) -> list[Step] | None:
    """Steps that take the nearest layout that is still missing; layout 0 is there. None where one cannot be reached."""
    have, steps, missing = [0], [], list(range(1, count))
    while missing:
        reach = [(arcs[i, j], j, have.index(i)) for j in missing for i in have if (i, j) in arcs]
        if not reach:
            return None
        _, j, at = min(reach)
        steps.append((have[at], j))
        have.append(j)
        missing.remove(j)
    return steps


def _ordered(steps: list[Step]) -> list[Step]:
    """The steps of an arborescence, each after the one that makes its source."""
    have, out = {0}, []
    while len(out) < len(steps):
        out += [(i, j) for i, j in steps if i in have and j not in have]
        have |= {j for _, j in out}
    return out
