"""What an assignment comes to, term by term: its choices and the conversions that it pays for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autotp.cost.terms import NOTHING, Cost
from autotp.ir.layouts import Layout

from .problem import Problem, Use, ValueId, conversions

Price = Callable[[ValueId, Layout, Layout], Cost | None]


def spent(problem: Problem, chosen: Sequence[int], price: Price) -> Cost:
    """The terms of all items and conversions, whose weighted sum is the seconds that the solver minimised.

    Args:
        problem: items, uses and conversions. chosen: index of each item's choice.
        price: the terms of a conversion; None where there is none.
    """
    picked = [item.choices[k] for item, k in zip(problem.items, chosen, strict=True)]
    own = (choice.cost * item.count for choice, item in zip(picked, problem.items, strict=True))
    paid = (cost * use.count for use in problem.uses for cost in _paid(problem, use, chosen, price))
    return Cost.total([*own, *paid])


def _paid(problem: Problem, use: Use, chosen: Sequence[int], price: Price) -> Iterator[Cost]:
    for a, b in taken(problem, use, chosen):
        yield price(use.value, a, b) or NOTHING


def taken(problem: Problem, use: Use, chosen: Sequence[int]) -> list[tuple[Layout, Layout]]:
    """The conversions of a use, where these choices are taken."""
    wanted = {problem.items[i].choices[chosen[i]].ins[slot] for i, slot in use.consumers}
    produced = _produced(problem, use.value, chosen)
    return conversions(produced, wanted, lambda a, b: problem.convert(use.value, a, b)) or []


def _produced(problem: Problem, value: ValueId, chosen: Sequence[int]) -> Layout:
    """How the item that makes a value leaves it."""
    for item, k in zip(problem.items, chosen, strict=True):
        if value in item.outs:
            return item.choices[k].outs[item.outs.index(value)]
    raise KeyError(value)
