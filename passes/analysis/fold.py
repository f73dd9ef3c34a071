"""Find repeated blocks: equal nodes of equal blocks share one decision, so that solving does not grow with depth."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import fx

from autotp import compat
from autotp.ir.graph import Capture, tensors
from autotp.ir.leaves import CONSTANT
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.scopes import module_path

from .lists import items

LISTS = -1  # in place of a depth
NUMBER = re.compile(r"\d+$")  # of a constant: torch counts them over the whole model
INDEXED = re.compile(r"(^|\.)\d+(@\d+)?$")  # the model itself may be the list


def fold(program: Capture, grads: set[fx.Node], marks: Mapping[fx.Node, str] | None = None) -> dict[fx.Node, fx.Node]:
    """Every node and leaf -> the representative of its class: itself, or the same node in the first equal block.

    Nodes with different `marks` (such as pins) are not equal.

    Args:
        program: the canonical graph.
        grads: nodes whose values carry gradients.
        marks: node -> what sets it apart from its equals.
    """
    names = {x.node: x.name for x in program.leaves}
    names |= {x.node: NUMBER.sub("", x.name) for x in program.leaves if x.kind is CONSTANT}
    marked = marks or {}

    @cache
    def shape(n: fx.Node) -> Any:
        return marked.get(n), tuple((n in grads, sizes(v), v.dtype) for v in tensors(n))

    representative: dict[Any, fx.Node] = {}
    for level in (LISTS, 0, 1, 2, 3):
        containers = items(list(program.graph.nodes)) if level == LISTS else _instances(program, level, representative)
        for blocks in containers.values():
            first: dict[Any, list[fx.Node]] = {}
            for path, nodes in blocks.items():
                signature, members = _signature(path, nodes, names, shape)
                twins = first.setdefault(signature, members)
                representative.update((n, t) for n, t in zip(members, twins, strict=True) if n is not t)
    return {n: _first(representative, n) for n in program.graph.nodes}


def _first(representative: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """What stands for a node: a block that stands for others may hold equal blocks itself."""
    while node in representative:
        node = representative[node]
    return node


def _instances(program: Capture, level: int, representative: dict) -> dict[str, dict[str, list[fx.Node]]]:
    """Container -> block -> its nodes, for the blocks at this depth of indexed modules."""
    out: dict[str, dict[str, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for n in program.graph.nodes:
        if n.op != "call_function" or n in representative:
            continue
        indexed = [p for p in module_path(n) if INDEXED.search(p)]
        if len(indexed) > level:
            out[INDEXED.sub("", indexed[level])][indexed[level]].append(n)
    return out


def _signature(
    path: str, nodes: list[fx.Node], names: dict[fx.Node, str], shape: Callable[[fx.Node], Any]
) -> tuple[Any, list[fx.Node]]:
    """A value equal for equal blocks, and the block's nodes and leaves in the order of the signature."""
    place = {n: i for i, n in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}
    leaves: dict[fx.Node, int] = {}

    def encode(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return repr(x)
        if x in place:
            return ("node", place[x])
        name = names.get(x, "")
        if name.startswith(path.split("@")[0] + "."):
            return ("leaf", name[len(path.split("@")[0]) :], leaves.setdefault(x, len(leaves)), shape(x))
        return ("outside", outside.setdefault(x, len(outside)), shape(x))

    rows = tuple(
        (n.target, tuple(map(encode, compat.tree_leaves((n.args, n.kwargs)))), shape(n), mark(n).no_grad) for n in nodes
    )
    return rows, [*nodes, *leaves]
