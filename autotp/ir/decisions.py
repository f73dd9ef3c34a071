"""Decisions of how operators run, as a plan says it; what it is read with needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .layouts import Distribution, Layout, SlotLayouts, kinds


@dataclass(frozen=True)
class Decision:
    """Decision for one operator: a layout per operand slot and per result, and the split factor with its loop."""

    ins: SlotLayouts
    outs: SlotLayouts
    factor: int | None = None
    loop: Distribution | None = None


# ---- as plain data ---------------------------------------------------------------------------------------------------

# Layouts and loops as plain data for JSON, and back: each kind reads and writes its own.


def plain(x: Any) -> Any:
    """Convert layouts, distributions, mappings and sequences to what JSON can hold."""
    if isinstance(x, Layout | Distribution):
        return x.to_json()
    if isinstance(x, Mapping):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    return x


def read_loop(x: Any) -> Distribution | None:
    """Read the loop of a decision, as `plain` wrote it.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if not x:
        return None
    for kind in kinds():
        loop = kind.distribution_kind
        if loop is not None and loop.field in x:
            return loop.from_json(x)
    raise ValueError(f"{str(x)[:40]!r} is not a loop")


def read_layout(x: Any) -> Layout:
    """Read a layout, as `plain` wrote it.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    for kind in kinds():
        layout = kind.from_json(x)
        if layout is not None:
            return layout
    raise ValueError(f"{str(x)[:40]!r} is not a layout")
