"""Costs of an assignment, term by term: its choices and the conversions that it pays for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from autotp.cost.terms import NOTHING, Cost
from autotp.ir.layouts import Layout

from .problem import Problem, Use, ValueId, conversions
from .savings import Conversion

Price = Callable[[ValueId, Layout, Layout], Cost | None]


def cost_of(problem: Problem, choices: Sequence[int], price: Price) -> Cost:
    """The terms of all items and conversions, whose weighted sum is the seconds that the solver minimised.

    Args:
        problem: items, uses and conversions. choices: index of each item's choice.
        price: the terms of a conversion; None where there is none.
    """
    picks = [item.choices[k] for item, k in zip(problem.items, choices, strict=True)]
    own = (choice.cost * item.count for choice, item in zip(picks, problem.items, strict=True))
    uses = {(k, *step): use for k, use in enumerate(problem.uses) for step in steps_of(problem, use, choices)}
    conversions_cost = ((price(use.value, a, b) or NOTHING) * use.count for (_, a, b), use in uses.items())
    return Cost.total([*own, *conversions_cost, *saved(problem, choices, uses)])


def saved(problem: Problem, choices: Sequence[int], arcs: Collection[Conversion]) -> Iterator[Cost]:
    """Return what each saving comes to.

    Args:
        problem: with its savings. choices: index of each item's choice. arcs: the conversions that are paid for.
    """
    picks = [item.choices[k] for item, k in zip(problem.items, choices, strict=True)]
    keys = {(i, choice.ins, choice.outs) for i, choice in enumerate(picks)}
    for saving in problem.savings:
        yield Cost(**{saving.name: saving.seconds(arcs.__contains__, keys.__contains__)})


def steps_of(problem: Problem, use: Use, choices: Sequence[int]) -> list[tuple[Layout, Layout]]:
    """The conversions of a use, where these choices are taken."""
    targets = {problem.items[i].choices[choices[i]].ins[slot] for i, slot in use.consumers}
    produced = _produced(problem, use.value, choices)
    return conversions(produced, targets, lambda a, b: problem.convert(use.value, a, b)) or []


def _produced(problem: Problem, value: ValueId, choices: Sequence[int]) -> Layout:
    """Return how the item that makes a value leaves it."""
    for item, k in zip(problem.items, choices, strict=True):
        if value in item.outs:
            return item.choices[k].outs[item.outs.index(value)]
    raise KeyError(value)
