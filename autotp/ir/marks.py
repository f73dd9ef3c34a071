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
    """A conversion over a mesh axis beside tp.

    Attributes:
        source, target: layouts before and after. ranks, axis: size and name of the axis.
        inner: number of parts of a dimension that are each sharded over the axis, so that as many tp ranks can split
            it.
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
            of a value with as many elements, with which it is sharded; None where it is sharded as the call is.
        views: result -> the operand slot whose memory it shares.
    """

    slots: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    extra: tuple[tuple[float, int | None], ...] = ()
    views: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Mark:
    """Marks of passes on one node; None where no pass has set one."""

    no_grad: bool | None = None
    """True where the call stands under `torch.no_grad`, so that its result carries no gradient."""

    batch: BatchConversion | None = None
    """The conversion over a mesh axis beside tp that the call is."""

    layout: Layout | None = None
    """The value's layout over the tp ranks."""

    conversion: tuple[Layout, Layout] | None = None
    """The layouts before and after, where the call is a conversion over the tp ranks."""

    axis: Axis | None = None
    """The mesh axis whose rank and size the call takes as arguments."""

    scope: tuple[str, ...] | None = None
    """Module calls and checkpointed regions that hold the call, outermost first, where a pass moved it there."""

    flops: float | None = None
    """Floating-point operations of the whole call, remembered when it is first priced."""

    saved: Saved | None = None
    """The memory that autograd keeps of the call, remembered when it is first asked."""


NOTHING = Mark()


def mark(node: fx.Node) -> Mark:
    """Read what is written on a node."""
    return node.meta.get(KEY, NOTHING)


def conversion_of(node: fx.Node) -> tuple[Layout, Layout]:
    """Return the layouts before and after a call that is a conversion over the tp ranks."""
    conversion = mark(node).conversion
    assert conversion is not None, node.format_node()
    return conversion


def write(node: fx.Node, **fields: Any) -> None:
    """Write these fields of the node's record; the others stay."""
    node.meta[KEY] = Mark(**{**mark(node).__dict__, **fields})  # `replace` takes three times as long


def inherit(new: fx.Node, source: fx.Node, val: Any = None, **fields: Any) -> None:
    """Give `new`, which stands for `source`, torch's entries and the record of that, with this value and fields."""
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
        env: node -> what copies read in its place, to which the copies are added. A node that is in it already is not
            copied.
        graph: receives the copies, at its insertion point; by default a new graph. Operands in the same graph that are
            not in `env` are read as they are.

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
        node: the original.
        graph: receives the copy, at its insertion point.
        operand: maps each node that the original reads, from the first to the last, to what the copy reads.
        name: of the copy, by default the node's own.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
    target = name if name and node.op == "placeholder" else node.target
    new = graph.create_node(node.op, target, args, kwargs, name or node.name, node.type)
    new.meta = dict(node.meta)
    return new
