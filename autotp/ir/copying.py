"""Copies of graphs: all of one, some of its nodes, into another or once more into itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import fx


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
