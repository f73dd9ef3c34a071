"""Seconds that choices and conversions save together, as rows: communication beside arithmetic, calls that are one.

A saving is the smallest of its caps, each linear in what is paid and taken. Minimising makes it as large as they let
it, so that `s = min(caps)` needs no more than `s <= cap` for each: of two things that run beside each other the step
has the longer one, and of k calls that start as one k - 1 starts are saved, `min over j of the sum over i != j`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotp.ir.layouts import Layout, SlotLayouts

from .integer_program import IntegerProgram, Row, Terms

Conversion = tuple[int, Layout, Layout]  # number of the use, from which layout to which
ChoiceKey = tuple[int, SlotLayouts, SlotLayouts]  # number of the item, layouts of the choice


@dataclass(frozen=True)
class Cap:
    """Seconds for each conversion that is paid and each choice that is taken, and for nothing; never below 0 in all."""

    conversions: Mapping[Conversion, float] = field(default_factory=dict)
    choices: Mapping[ChoiceKey, float] = field(default_factory=dict)
    always: float = 0.0

    def value(self, conversions: Container[Conversion], choices: Container[ChoiceKey]) -> float:
        """Its seconds, where these conversions are paid and these choices taken."""
        total = sum(x for c, x in self.conversions.items() if c in conversions)
        return self.always + total + sum(x for c, x in self.choices.items() if c in choices)

    @property
    def most(self) -> float:
        """Return what it can be at most; of an item's choices one is taken."""
        best = {}
        for (item, *_), x in self.choices.items():
            best[item] = max(best.get(item, 0.0), x)
        return self.always + sum(max(x, 0.0) for x in self.conversions.values()) + sum(best.values())


@dataclass(frozen=True)
class Saving:
    """A saving of `count` equal instances.

    Attributes:
        name: of the cost's term.
        parts: the caps of each part, whose seconds add up.
        count: of instances.
    """

    name: str
    parts: tuple[tuple[Cap, ...], ...]
    count: int

    def seconds(self, conversions: Container[Conversion], choices: Container[ChoiceKey]) -> float:
        """Return the seconds that all instances save, where these conversions are paid and these choices taken."""
        one = 0.0
        for caps in self.parts:
            one += max(min(cap.value(conversions, choices) for cap in caps), 0.0)
        return self.count * one


def most(caps: Sequence[Cap]) -> float:
    """Return what the smallest of these can be at most."""
    return min(cap.most for cap in caps)


def add_savings(
    program: IntegerProgram, savings: Iterable[Saving], conversion_columns: Mapping[Conversion, int],
    choice_columns: Mapping[ChoiceKey, int], unit: float,
) -> None:  # fmt: skip
    """Columns and rows of the savings.

    Args:
        program: with the columns of choices and conversions.
        savings: to add. conversion_columns, choice_columns: the column of each conversion and choice that there is.
        unit: of the program's times in a second.
    """
    for saving in savings:
        for caps in saving.parts:
            scale = most(caps)
            if scale > 0:
                column = program.column(False)
                program.microseconds[column] = -scale * saving.count * unit
                program.rows += [_below(column, scale, cap, conversion_columns, choice_columns) for cap in caps]


def _below(
    column: int, scale: float, cap: Cap, conversion_columns: Mapping[Any, int], choice_columns: Mapping[Any, int]
) -> Row:
    """The column, in parts of `scale`, is at most the cap."""
    terms: Terms = {column: 1.0}
    for columns, prices in ((conversion_columns, cap.conversions), (choice_columns, cap.choices)):
        for key, seconds in prices.items():
            if key in columns:
                terms[columns[key]] = terms.get(columns[key], 0.0) - seconds / scale
    return Row(terms, -np.inf, cap.always / scale)
