"""Find repeated blocks: equal nodes of equal blocks share one decision, so that solving does not grow with depth."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx

from autotp import compat
from autotp.ir.graph import CONSTANT, Capture, tensors
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.scopes import Block, Blocks, module_of, module_path

LISTS = -1  # in place of a depth
NUMBER = re.compile(r"\d+$")  # of a constant: torch counts them over the whole model
INDEXED = re.compile(r"(^|\.)\d+(@\d+)?$")  # the model itself may be the list


def repeated(program: Capture, grads: set[fx.Node]) -> Blocks:
    """The blocks of a program, found once: all who need them read `Capture.blocks`.

    Args:
        program: the canonical graph. grads: nodes whose values carry gradients.
    """
    if [*program.blocks.same] != [*program.graph.nodes]:  # none were, or of the graph before a pass
        program.blocks = find(program, grads)
    return program.blocks


def find(program: Capture, grads: set[fx.Node], marks: Mapping[fx.Node, str] | None = None) -> Blocks:
    """Find blocks, and which of them are equal. Nodes with different `marks` (such as pins) are not.

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

    blocks: list[Block] = []
    twins: dict[fx.Node, fx.Node] = {}
    paths = {n: module_path(n) for n in program.graph.nodes if n.op == "call_function"}
    # First lists whose items are not called themselves, as no path of modules says where such a block ends; then
    # modules with an index, the outer ones first: what is equal as a whole layer needs no comparison of its parts.
    for level in (LISTS, 0, 1, 2, 3):
        place: dict[fx.Node, int] = {}  # first node of a block of this level -> place of the block
        for container, members in (items(paths) if level == LISTS else _instances(paths, level)).items():
            first: dict[Any, tuple[int, list[fx.Node]]] = {}
            for path, nodes in members.items():
                place[nodes[0]] = equal = len(blocks)
                if own := [n for n in nodes if n not in twins]:
                    signature, own = _signature(path, own, names, shape)
                    equal, theirs = first.setdefault(signature, (equal, own))
                    twins.update((n, t) for n, t in zip(own, theirs, strict=True) if n is not t)
                else:
                    equal = place.get(_first(twins, nodes[0]), equal)
                blocks.append(Block(path, container, tuple(nodes), equal))
    return Blocks(tuple(blocks), {n: _first(twins, n) for n in program.graph.nodes})


def _first(twins: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """Follow a node to its representative: a block that stands for others may hold equal blocks itself."""
    while node in twins:
        node = twins[node]
    return node


def _instances(paths: Mapping[fx.Node, tuple[str, ...]], level: int) -> dict[str, dict[str, list[fx.Node]]]:
    """Container -> block -> its nodes, for the blocks at this depth of indexed modules."""
    out: dict[str, dict[str, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for n, path in paths.items():
        indexed = [p for p in path if INDEXED.search(p)]
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


# ---- lists of blocks -------------------------------------------------------------------------------------------------

# Blocks that are no modules of their own: `for attention, forward in self.layers:` calls what is in a list's items.
#
# An item of such a list has no forward, so no node says that it belongs to it; what stands between the calls, such as
# the residual sums, belongs to the module that has the list. A block is all from an item's first node to the next
# one's.

ITEM = re.compile(r"^(.*?\.)?\d+(?=\.)")  # up to the outermost place in a list that is not the last of the path
PLACED = re.compile(r"(^|\.)\d+$")

Place = tuple[str, tuple[str, ...]]  # an item, and the modules around its list, outermost first


def items(paths: Mapping[fx.Node, tuple[str, ...]]) -> dict[str, dict[str, list[fx.Node]]]:
    """List -> item -> its nodes in order, for lists whose items are not called themselves, outside of other blocks.

    Args:
        paths: call -> the modules around it, in the order of the graph.
    """
    modules = {module_of(p) for path in paths.values() for p in path}
    places = {n: place for n, path in paths.items() if (place := _place(path, modules)) is not None}
    lists: dict[Place, list[fx.Node]] = defaultdict(list)
    for n, (item, around) in places.items():
        lists[PLACED.sub("", item), around].append(n)
    calls = list(paths)
    containers = {}
    for (name, around), members in lists.items():
        blocks = _blocks(calls, members, places)
        inside = all(paths[n][: len(around)] == around for block in blocks.values() for n in block)
        if len(blocks) > 1 and inside:
            containers[name] = blocks
    return containers


def _place(path: tuple[str, ...], modules: set[str]) -> Place | None:
    """The item of a list that a node lies in; None where it lies in none, or in a block before."""
    for level, name in enumerate(path):
        item = ITEM.match(module_of(name))
        if item is not None and item.group(0) not in modules:
            return item.group(0), path[:level]
        if PLACED.search(module_of(name)):
            return None
    return None


def _blocks(
    calls: Sequence[fx.Node], members: Sequence[fx.Node], places: Mapping[fx.Node, Place]
) -> dict[str, list[fx.Node]]:
    """Item -> all nodes from its first to the next item's; of the last as many as of the first. None where they mix."""
    order = {n: i for i, n in enumerate(calls)}
    runs: list[tuple[str, int]] = []
    for n in members:
        item = places[n][0]
        if not runs or runs[-1][0] != item:
            runs.append((item, order[n]))
    if len({item for item, _ in runs}) < len(runs) or len(runs) < 2:
        return {}
    length = runs[1][1] - runs[0][1]
    ends = [start for _, start in runs[1:]] + [runs[-1][1] + length]
    return {item: list(calls[start:end]) for (item, start), end in zip(runs, ends, strict=True)}
