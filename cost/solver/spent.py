"""What an assignment comes to, term by term: its choices and the conversions that it pays for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from autotp.cost.terms import NOTHING, Cost
from autotp.ir.layouts import Layout

from .problem import Problem, Use, ValueId, conversions
from .savings import Conversion

Price = Callable[[ValueId, Layout, Layout], Cost | None]


def spent(problem: Problem, chosen: Sequence[int], price: Price) -> Cost:
    """The terms of all items and conversions, whose weighted sum is the seconds that the solver minimised.

    Args:
        problem: items, uses and conversions. chosen: index of each item's choice.
        price: the terms of a conversion; None where there is none.
    """
    picked = [item.choices[k] for item, k in zip(problem.items, chosen, strict=True)]
    own = (choice.cost * item.count for choice, item in zip(picked, problem.items, strict=True))
    paid = {(k, *step): use for k, use in enumerate(problem.uses) for step in taken(problem, use, chosen)}
    sent = ((price(use.value, a, b) or NOTHING) * use.count for (_, a, b), use in paid.items())
    return Cost.total([*own, *sent, *saved(problem, chosen, paid)])


def saved(problem: Problem, chosen: Sequence[int], paid: Collection[Conversion]) -> Iterator[Cost]:
    """What each saving comes to.

    Args:
        problem: with its savings. chosen: index of each item's choice. paid: the conversions that are paid for.
    """
    picked = [item.choices[k] for item, k in zip(problem.items, chosen, strict=True)]
    taken = {(i, choice.ins, choice.outs) for i, choice in enumerate(picked)}
    for saving in problem.savings:
        yield Cost(**{saving.name: saving.seconds(paid.__contains__, taken.__contains__)})


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
