"""What a program asks of the sizes of its inputs: stated once, as words for an error and as code for every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor

from autotp import compat

from .op import expression
from .sizes import Size, substitute

Place = tuple[int, int]  # a tensor's place among the inputs that are tensors, and the dimension
MAX_SIZE = 2**62  # elements in a dimension whose symbol has no range


@dataclass(frozen=True)
class SizeBounds:
    """The sizes that a program takes.

    Attributes:
        symbols: where each symbol is read: the first dimension that is this symbol alone.
        sizes: every other dimension, and what it has to be.
        ranges: least and greatest value of each symbol. guards: relations that hold between symbols.
    """

    symbols: Mapping[sympy.Symbol, Place]
    sizes: Sequence[tuple[Place, Size]]
    ranges: Mapping[sympy.Symbol, tuple[int, int]]
    guards: Sequence[sympy.Basic]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], ranges: Mapping[sympy.Symbol, tuple[int, int]], guards: Sequence[sympy.Basic]
    ) -> SizeBounds:
        """Args:
        tensors: the (fake) tensors among the inputs, in order.
        ranges, guards: as in `Capture`.
        """
        dimensions = [((i, d), expression(n)) for i, value in enumerate(tensors) for d, n in enumerate(value.shape)]
        symbols: dict[sympy.Symbol, Place] = {}
        for place, size in dimensions:
            if isinstance(size, sympy.Symbol):
                symbols.setdefault(size, place)
        first = set(symbols.values())
        others = [(place, size) for place, size in dimensions if place not in first]
        # A size in symbols that no dimension gives by itself may be any; so may what is said of such symbols.
        derived = [
            (place, size) for place, size in others if isinstance(size, int) or size.free_symbols <= symbols.keys()
        ]
        within = {s: ranges.get(s, (0, MAX_SIZE)) for s in symbols}
        return cls(symbols, derived, within, [g for g in guards if g.free_symbols <= symbols.keys()])

    def broken(self, shapes: Sequence[Sequence[int]], names: Sequence[str]) -> str | None:
        """Why these shapes do not fit, in words; None where they do.

        Args:
            shapes: of the tensors among the inputs, each with as many dimensions as was captured.
            names: of these inputs.
        """
        values = {symbol: int(shapes[i][d]) for symbol, (i, d) in self.symbols.items()}
        for (i, d), size in self.sizes:
            if (size if isinstance(size, int) else int(substitute(size, values))) != shapes[i][d]:
                return f"input {names[i]!r} has size {shapes[i][d]} in dimension {d}, captured with {size}"
        for symbol, (low, high) in self.ranges.items():
            if not low <= values[symbol] <= high:
                return f"size {values[symbol]} is outside the captured range [{low}, {high}]"
        broken = next((g for g in self.guards if substitute(g, values) == sympy.false), None)
        return None if broken is None else f"the captured program needs {broken}"

    def code(self) -> tuple[list[Place], Callable[..., bool]] | None:
        """Places of sizes, and a function of the sizes there: whether they fit. None where that cannot be written."""
        tests: list[Any] = [s >= low for s, (low, _) in self.ranges.items()]
        tests += [s <= high for s, (_, high) in self.ranges.items()]
        tests += self.guards
        code = compat.size_code(list(self.symbols), tests, [size for _, size in self.sizes])
        if code is None:
            return None
        return [*self.symbols.values(), *(place for place, _ in self.sizes)], code
