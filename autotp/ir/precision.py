"""In what the large products of a program are computed, as the user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autotp.errors import InputError

TENSORWISE, ROWWISE = "tensorwise", "rowwise"
NAMES = {"float8": TENSORWISE, "float8-rowwise": ROWWISE}
ALIGNED = 16  # elements: sizes that kernels for float8 multiply along are multiples of this
FIELDS = "recipe", "smallest", "skip", "head"


@dataclass(frozen=True)
class Precision:
    """Products in float8 with dynamic scales.

    Attributes:
        recipe: "tensorwise": a scale for each operand; "rowwise": for each of its rows.
        smallest: both sizes of a weight are at least this; None: as torchao's filters have it, by the recipe.
        skip: patterns of weights that stay as they are.
        head: whether products that no other product reads from, as the head's, are in float8 too.
    """

    recipe: str = TENSORWISE
    smallest: int | None = None
    skip: tuple[str, ...] = ()
    head: bool = False

    @classmethod
    def read(cls, given: Any) -> Precision | None:
        """What a public function's argument asks for; None for the model's own.

        Raises:
            InputError: it is not known.
        """
        if given is None or isinstance(given, Precision):
            return given
        if isinstance(given, str) and given in NAMES:
            return cls(NAMES[given])
        if isinstance(given, Mapping) and not set(given) - set(FIELDS):
            return _checked(cls(**{**given, "skip": _patterns(given.get("skip", ()))}))
        raise InputError(
            f"precision={given!r} is not known: give None, {' or '.join(map(repr, NAMES))}, or a mapping of "
            f"{', '.join(FIELDS)}, such as {{'recipe': 'rowwise', 'smallest': 1024}}."
        )

    def takes(self, weight: str, n: int, k: int) -> bool:
        """Whether the product by a weight [n, k] of this name is large enough, and not left out."""
        if n % ALIGNED or k % ALIGNED or any(fnmatchcase(weight, p) for p in self.skip):
            return False
        if self.smallest is not None:
            return min(n, k) >= self.smallest
        if self.recipe == TENSORWISE:
            return k > 4096 or n > 1024
        return n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def _patterns(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _checked(precision: Precision) -> Precision:
    if precision.recipe not in (TENSORWISE, ROWWISE):
        raise InputError(
            f"precision: the recipe {precision.recipe!r} is not known: give {TENSORWISE!r} or {ROWWISE!r}."
        )
    size = precision.smallest
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise InputError(f"precision: smallest={size!r}: give a number of elements, or None for torchao's sizes.")
    return precision
