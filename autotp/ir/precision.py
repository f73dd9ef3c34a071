"""Precision of the large products of a program, as the user asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autotp.errors import InputError
from autotp.text import counts

TENSORWISE, ROWWISE, DELAYED = "tensorwise", "rowwise", "delayed"
ROWWISE_HP = "rowwise_with_gw_hp"  # torchao's name: gradients of weights in high precision
RECIPES = TENSORWISE, ROWWISE, ROWWISE_HP, DELAYED
NAMES = {"float8": TENSORWISE, "float8-rowwise": ROWWISE, "float8-delayed": DELAYED}
ALIGNED = 16  # elements: sizes that kernels for float8 multiply along are multiples of this
FIELDS = "recipe", "smallest", "skip", "head", "history"
HISTORY, LATEST = "float8_history", "float8_latest"  # buffers of a layer that is scaled by earlier calls


@dataclass(frozen=True)
class Precision:
    """Products in float8 with scales.

    Attributes:
        recipe: "tensorwise": a scale for each operand; "rowwise": for each of its rows; "rowwise_with_gw_hp": likewise,
            and gradients of weights not in float8; "delayed": for each operand, by what earlier calls had of it.
        smallest: both sizes of a weight are at least this; None: as torchao's filters have it, by the recipe.
        skip: patterns of weights that stay as they are.
        head: whether products that no other product reads from, as the head's, are in float8 too.
        history: calls that delayed scaling looks back over.
    """

    recipe: str = TENSORWISE
    smallest: int | None = None
    skip: tuple[str, ...] = ()
    head: bool = False
    history: int = 16

    @classmethod
    def read(cls, choice: Any) -> Precision | None:
        """Read the argument of a public function; None stands for the model's own precision.

        Raises:
            InputError: it is not known.
        """
        if choice is None or isinstance(choice, Precision):
            return choice
        if isinstance(choice, str) and choice in NAMES:
            return cls(NAMES[choice])
        if isinstance(choice, Mapping) and not set(choice) - set(FIELDS):
            return _checked(cls(**{**choice, "skip": _patterns(choice.get("skip", ()))}))
        raise InputError(
            f"precision={choice!r} is not known: give None, {_either(NAMES)}, or a mapping of "
            f"{', '.join(FIELDS)}, such as {{'recipe': 'rowwise', 'smallest': 1024}}."
        )

    def takes(self, weight: str, n: int, k: int) -> bool:
        """Say whether the product by a weight [n, k] of this name is large enough, and not left out."""
        if n % ALIGNED or k % ALIGNED or any(fnmatchcase(weight, p) for p in self.skip):
            return False
        if self.smallest is not None:
            return min(n, k) >= self.smallest
        if self.recipe not in (ROWWISE, ROWWISE_HP):
            return k > 4096 or n > 1024
        return n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def _patterns(choice: Any) -> tuple[str, ...]:
    return (choice,) if isinstance(choice, str) else tuple(choice)


def _checked(precision: Precision) -> Precision:
    if precision.recipe not in RECIPES:
        raise InputError(f"precision: the recipe {precision.recipe!r} is not known: give {_either(RECIPES)}.")
    if precision.smallest is not None and not counts(precision.smallest):
        fault = f"precision: smallest={precision.smallest!r}"
        raise InputError(f"{fault}: give a number of elements, or None for torchao's sizes.")
    if not counts(precision.history):
        raise InputError(f"precision: history={precision.history!r}: give a number of calls, such as 16.")
    return precision


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
