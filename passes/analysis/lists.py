"""Blocks that are no modules of their own: `for attention, forward in self.layers:` calls what is in a list's items.

An item of such a list has no forward, so no node says that it belongs to it; what stands between the calls, such as the
residual sums, belongs to the module that has the list. A block is all from an item's first node to the next one's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from autotp.ir.scopes import module_of, module_path

ITEM = re.compile(r"^(.*?\.)?\d+(?=\.)")  # up to the outermost place in a list that is not the last of the path
PLACED = re.compile(r"(^|\.)\d+$")

Place = tuple[str, tuple[str, ...]]  # an item, and the modules around its list, outermost first


def items(nodes: Sequence[fx.Node]) -> dict[str, dict[str, list[fx.Node]]]:
    """List -> item -> its nodes in order, for lists whose items are not called themselves, outside of other blocks.

    Args:
        nodes: of a graph, in its order.
    """
    paths = {n: module_path(n) for n in nodes if n.op == "call_function"}
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
