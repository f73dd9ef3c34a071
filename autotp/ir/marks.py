"""Marks that passes write on the nodes of a graph: one record a node, beside torch's own `val` and `nn_module_stack`.

`mark` reads it, `write` and `inherit` write it; `copying.copy_graph` carries it along. What each stage must have
written is checked by `autotp.passes.schema`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import fx

from .layouts import Layout

KEY = "autotp"

Axis = Literal["tp", "dp", "cp"]


class BatchConversion(NamedTuple):
    """A conversion over a mesh axis beside tp, which has so many ranks.

    Attributes:
        source, target: layouts before and after. axis: its name.
        inner: parts of a dimension that are each dealt over the axis, for as many tp ranks to split it.
    """

    source: Layout
    target: Layout
    ranks: int
    axis: Axis = "dp"
    inner: int = 1


@dataclass(frozen=True)
class Saved:
    """Memory that one call keeps for its backward, and whose memory its results are.

    Attributes:
        slots, results: positions of the operands and results that are kept.
        extra: what is neither: a mask, statistics, a contiguous copy. Bytes, and the position (operands, then results)
            of a value with as many elements, which it is dealt out with; None where it is dealt out as the call is.
        views: result -> the operand slot whose memory it shares.
    """

    slots: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    extra: tuple[tuple[float, int | None], ...] = ()
    views: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Mark:
    """Marks of passes on one node. None means that nobody has said it."""

    no_grad: bool | None = None
    """True where the call stands under `torch.no_grad`, so that its result carries no gradient."""

    batch: BatchConversion | None = None
    """The conversion over a mesh axis beside tp that the call is."""

    layout: Layout | None = None
    """How the value lies over the tp ranks."""

    conversion: tuple[Layout, Layout] | None = None
    """From which layout to which the call converts its operand over the tp ranks."""

    axis: Axis | None = None
    """The mesh axis whose rank and size the call takes as arguments."""

    scope: tuple[str, ...] | None = None
    """Module calls and checkpointed regions that hold the call, outermost first, where a pass moved it there."""

    flops: float | None = None
    """Floating-point operations of the whole call, remembered when it is first priced."""

    saved: Saved | None = None
    """What autograd keeps of the call, remembered when it is first asked."""


NOTHING = Mark()


def mark(node: fx.Node) -> Mark:
    """Read what is written on a node."""
    return node.meta.get(KEY, NOTHING)


def conversion_of(node: fx.Node) -> tuple[Layout, Layout]:
    """From which layout to which a conversion over the tp ranks goes; of other calls it must not be asked."""
    conversion = mark(node).conversion
    assert conversion is not None, node.format_node()
    return conversion


def write(node: fx.Node, **fields: Any) -> None:
    """Write these fields of the node's record; the others stay."""
    node.meta[KEY] = Mark(**{**mark(node).__dict__, **fields})  # `replace` takes three times as long


def inherit(new: fx.Node, source: fx.Node, val: Any = None, **fields: Any) -> None:
    """`new` stands for `source`: it gets torch's entries and the record of that, with this value and these fields
    changed."""
    new.meta = dict(source.meta)
    if val is not None:
        new.meta["val"] = val
    if fields:
        write(new, **fields)
