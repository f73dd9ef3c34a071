"""The decision problem as data: items with choices, values with groups of consumers. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .layouts import Dealt, Layout

ValueId = Hashable


@dataclass(frozen=True)
class Choice:
    """One legal way to run an item: a layout per operand slot and per result, and what it costs one instance."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    seconds: float = 0.0
    saved: float = 0.0  # bytes of activations kept for the backward
    stored: float = 0.0  # bytes of parameters held
    penalty: int = 0  # breaks ties: segments, unevenness
    factor: int | None = None  # index of the split factor in the operator's rule
    loop: Dealt | None = None  # how that factor's loop is dealt


@dataclass
class Item:
    """An operator, a leaf, or the output: `count` equal instances that share one choice."""

    name: str
    choices: list[Choice]
    ins: list[frozenset[ValueId]] = field(default_factory=list)
    outs: list[ValueId] = field(default_factory=list)
    count: int = 1


@dataclass(frozen=True)
class Use:
    """`count` instances of a value whose consumers are these (item index, slot)."""

    value: ValueId
    consumers: tuple[tuple[int, int], ...]
    count: int


@dataclass
class Problem:
    """Minimise the items' and the conversions' seconds; a conversion is paid once per value and layout."""

    items: list[Item]
    uses: list[Use]
    convert: Callable[[ValueId, Layout, Layout], float | None]  # seconds of a conversion, None where there is none


@dataclass(frozen=True)
class Solution:
    """The chosen index per item, with what was proved of it."""

    chosen: tuple[int, ...]
    seconds: float
    bound: float
    least_stored: float
    stored: float


def conversions(
    produced: Layout, wanted: set[Layout], cost: Callable[[Layout, Layout], float | None]
) -> list[tuple[Layout, Layout]] | None:
    """The cheapest set of conversions from one layout to all wanted ones, through wanted ones where that is cheaper.

    Steps come in an order in which each source exists already. None where a layout cannot be reached.
    """
    have, steps, missing = [produced], [], sorted(wanted - {produced}, key=str)
    while missing:
        reach = [(c, i, j) for i, b in enumerate(missing) for j, a in enumerate(have) if (c := cost(a, b)) is not None]
        if not reach:
            return None
        _, i, j = min(reach)
        steps.append((have[j], missing[i]))
        have.append(missing.pop(i))
    return steps
