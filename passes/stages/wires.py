"""What flows from one stage to the next: values in a layout whose gradient is again the thing itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from autotp.errors import PlanError
from autotp.ir.layouts import Layout


@dataclass(frozen=True)
class Wire:
    """A value that a stage sends to the next one, each tp rank what it holds of it.

    Attributes:
        name: of the value in the program. value: its fake whole.
        layout: how it lies over the tp ranks. graded: whether a gradient comes back.
    """

    name: str
    value: Tensor
    layout: Layout
    graded: bool


def passes(layout: Layout, graded: bool) -> bool:
    """Whether a value that lies so may flow between stages: what comes back must not be a sum that is still to be
    taken, so a value with a gradient is Invariant or Shard, and no value is Partial."""
    return layout.mark in ("I", "S") or (not graded and layout.mark == "R")


def check(wires: Iterable[Wire], stage: int) -> None:
    """Refuse a boundary at which a sum is pending.

    Raises:
        PlanError: a value is Partial, or its gradient would be.
    """
    for wire in wires:
        if not passes(wire.layout, wire.graded):
            what = "is a summand" if wire.layout.mark == "P" else "has a gradient that is a summand"
            raise PlanError(
                f"between stages {stage} and {stage + 1} the value {wire.name} lies {wire.layout}: what a rank holds "
                f"{what}, and sums must be taken before a value leaves its stage. Please report the model."
            )


def tensor_of(node: fx.Node) -> Tensor:
    """The tensor that a node makes.

    Raises:
        PlanError: it makes none.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise PlanError(
            f"{node.name}, a number that data decides, is made in one stage and read in another: only tensors flow "
            "between stages. Use fewer stages, or tensor parallelism alone."
        )
    return value
