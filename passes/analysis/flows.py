"""Values at the boundaries of modules, and their layouts."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp.comm.conversions import f_bucket
from autotp.ir.layouts import I, Layout
from autotp.ir.marks import mark


@dataclass(frozen=True)
class Flow:
    """One value at the boundary of a module.

    Attributes:
        shown: whether hooks see it: no parameter, and the first of those that hold one value in several layouts.
        layout: its placement over the ranks.
        place: of the value, among all that flow there; those that hold the same one have the same.
    """

    shown: bool
    layout: Layout
    place: int = 0

    @property
    def whole(self) -> bool:
        """Say whether it is shown without a collective."""
        return _whole(self.layout)


def flows(nodes: Sequence[fx.Node], parameters: Set[fx.Node]) -> list[Flow]:
    """Describe the values at a boundary."""
    origins = list(map(_origin, nodes))
    layouts = [mark(n).layout or I for n in nodes]
    firsts: dict[fx.Node, int] = {}
    for i, (node, origin) in enumerate(zip(nodes, origins, strict=True)):
        hidden = origin in parameters or not isinstance(node.meta.get("val"), Tensor)
        at = firsts.get(origin)
        if not hidden and (at is None or (_whole(layouts[i]) and not _whole(layouts[at]))):
            firsts[origin] = i
    return [Flow(firsts.get(o) == i, layouts[i], origins.index(o)) for i, o in enumerate(origins)]


def _whole(layout: Layout) -> bool:
    """Say whether a value is shown without a collective."""
    return layout.mark in "IR"


def _origin(node: fx.Node) -> fx.Node:
    """Find the node whose value this one holds in another layout."""
    while True:
        source: Any = node.args[0] if node.args else None
        if mark(node).conversion and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        elif node.target is operator.getitem and source.target is f_bucket:
            node = source.args[0][node.args[1]]
        else:
            return node
