"""How operators run, as a plan says it: what it is read with needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .layouts import Distribution, Layout


@dataclass(frozen=True)
class Decision:
    """How one operator runs: a layout per operand slot and per result, and the split factor with its loop."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    factor: int | None = None
    loop: Distribution | None = None
