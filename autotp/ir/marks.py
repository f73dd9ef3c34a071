"""Marks that passes write on the nodes of a graph: one record a node, beside torch's own `val` and `nn_module_stack`.

`mark` reads it, `write` and `inherit` write it; `copy_graph` carries it along. What each stage must have
written is checked by `autotp.passes.schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
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


# ---- copies of graphs ------------------------------------------------------------------------------------------------

# Copies of graphs: all of one, some of its nodes, into another or once more into itself.


def copy_graph(
    nodes: Iterable[fx.Node], env: MutableMapping[fx.Node, Any] | None = None, graph: fx.Graph | None = None
) -> tuple[fx.Graph, MutableMapping[fx.Node, Any]]:
    """Copy nodes in this order, with their names where these are free, and their meta data.

    Args:
        nodes: each after those of them that it reads; `graph.nodes` for all, with the output.
        env: what copies read in place of a node, which is extended by the copies. A node that is there already is not
            copied.
        graph: what is written to, at its insertion point; by default a new graph. What copies read in the same graph
            and is not in `env` is read as it is.

    Returns:
        That graph, and `env`.
    """
    env = {} if env is None else env
    to = fx.Graph() if graph is None else graph

    def read(node: fx.Node) -> Any:
        return node if node not in env and node.graph is to else env[node]

    for node in nodes:
        if node not in env:
            env[node] = copy_node(node, to, read)
    return to, env


def copy_node(node: fx.Node, graph: fx.Graph, operand: Callable[[fx.Node], Any], name: str = "") -> fx.Node:
    """Copy one node.

    Args:
        node: what is copied.
        graph: what is written to, at its insertion point.
        operand: what the copy reads in place of each node that the original reads, asked from the first to the last.
        name: of the copy, by default the node's own.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
    target = name if name and node.op == "placeholder" else node.target
    new = graph.create_node(node.op, target, args, kwargs, name or node.name, node.type)
    new.meta = dict(node.meta)
    return new
