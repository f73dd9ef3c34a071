"""Two ways to compute the same: operators of a program, and what an optimisation puts in their place.

What a rewrite changed is read off by comparing a graph with its rewritten copy, so that nothing has to be said of a
rewrite beside the rewrite itself. Both ways become functions of the same values, which can be run and timed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.cost import size_hint
from autotp.ir.copying import copy_graph
from autotp.ir.marks import conversion_of, mark
from autotp.ir.op import aten
from autotp.ir.program import MeshPlace


class Value(NamedTuple):
    """An operand of both ways, as large as on this rank; `shape` None is a number, `graded`: it needs a gradient."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    graded: bool
    number: int = 0


@dataclass(frozen=True)
class Alternative:
    """Operators, and what stands in for them.

    Attributes:
        name: of what is put in.
        plain, other: functions of the same operands, which return their results as a tuple.
        operands: of both.
        sends: whether ranks send each other something in them, so that all run them at once.
    """

    name: str
    plain: fx.GraphModule
    other: fx.GraphModule
    operands: tuple[Value, ...]
    sends: bool = False

    @property
    def key(self) -> str:
        """Equal for equal operators of operands of equal sizes."""
        text = repr((self.name, self.plain.code, self.other.code, self.operands))
        return f"{self.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def alternative(
    name: str,
    graph: fx.Graph,
    rewrite: Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], object],
    place: MeshPlace,
    sends: bool = False,
    beside: Collection[fx.Node] = (),
) -> Alternative | None:
    """What a rewrite would put into a graph, beside what is there; the graph stays as it is.

    Args:
        name: of what it puts in.
        rewrite: of a copy, whose node for each of the graph's it is told.
        place: of this rank on the tp axis.
        sends: whether conversions are run, for what is about them. Otherwise those that keep a value's size are left
            out of both ways, where they send the same.
        beside: nodes that stand in both ways though it leaves them as they are.

    Returns:
        None where it rewrote nothing, or the two cannot be run by themselves.
    """
    copy, into = copy_graph(graph.nodes)
    rewrite(copy, into)
    copy.eliminate_dead_code()
    change = _Change(graph, copy, {c: g for g, c in into.items()}, beside)
    return change.alternative(name, place, sends)


class _Change:
    """The difference between a graph and its rewritten copy.

    Attributes:
        region: nodes of the graph that are gone, that read something else, or that lie between such.
        other: what is in their place in the copy.
        results: nodes of the region that are read outside of it, and in their place nodes of the copy.
    """

    def __init__(
        self, graph: fx.Graph, copy: fx.Graph, back: Mapping[fx.Node, fx.Node], beside: Collection[fx.Node] = ()
    ) -> None:
        self.graph, self.copy, self.back = graph, copy, back
        there = {back[c]: c for c in copy.nodes if c in back}
        unused = _unused(graph)
        self.region = {g for g in graph.nodes if (g not in there and g not in unused) or g in beside}
        self.results: dict[fx.Node, fx.Node] = {}
        for g, c in there.items():
            swapped = _swapped(g, c, back)
            if swapped is None:
                self.region.add(g)
            else:
                self.results.update(swapped)
        self.region |= _between(graph, self.region)
        added = [c for c in copy.nodes if c not in back]
        self.other = {*added, *(there[g] for g in self.region if g in there)}
        for g in self.region:
            if g in there and any(user not in self.region for user in g.users):
                self.results[g] = there[g]

    def alternative(self, name: str, place: MeshPlace, sends: bool) -> Alternative | None:
        """As functions of the values that either way reads."""
        while (inner := next((g for g in self._read() if not _runs_from(g)), None)) is not None:
            if inner.op == "placeholder":
                return None
            self.region.add(inner)  # what it is made of is taken instead
            self.other |= {c for c in self.copy.nodes if self.back.get(c) is inner}
        leaves = self._read()
        if not self.results or not all(isinstance(g.meta["val"], Tensor) for g in self.results):
            return None
        graded = _graded(self.graph)
        operands = tuple(_value(g, g in graded, place) for g in leaves)
        leaf_set = set(leaves)
        own = {c: g for c, g in self.back.items() if g in leaf_set}
        plain = _function(self.graph, self.region, leaves, {g: g for g in leaves}, list(self.results), sends)
        other = _function(self.copy, self.other, leaves, own, list(self.results.values()), sends)
        return None if plain is None or other is None else Alternative(name, plain, other, operands, sends)

    def _read(self) -> list[fx.Node]:
        """Nodes of the graph that are read by either way and lie outside of it, in order."""
        mine = {x for g in self.region for x in g.all_input_nodes} - self.region
        theirs = {self.back[x] for c in self.other for x in c.all_input_nodes if x not in self.other}
        return [g for g in self.graph.nodes if g in mine | theirs]


def _swapped(g: fx.Node, c: fx.Node, back: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node] | None:
    """What a node reads, and its copy reads in the place of that; None where it is another call."""
    theirs, mine = (compat.tree_leaves((list(n.args), dict(n.kwargs))) for n in (c, g))
    if c.target is not g.target or len(theirs) != len(mine):
        return None
    odd = [(a, b) for a, b in zip(mine, theirs, strict=True) if not _same(a, b, back)]
    if not all(isinstance(x, fx.Node) for pair in odd for x in pair):
        return None
    return dict(odd)


def _same(a: Any, b: Any, back: Mapping[fx.Node, fx.Node]) -> bool:
    return back.get(b) is a if isinstance(b, fx.Node) else bool(a == b)


def _unused(graph: fx.Graph) -> set[fx.Node]:
    """Calls whose results nothing reads, which a copy loses as dead code."""
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.is_impure() and set(node.users) <= unused:
            unused.add(node)
    return unused


def _between(graph: fx.Graph, region: set[fx.Node]) -> set[fx.Node]:
    """Nodes that read some of these, and are read by others of them, by any number of steps."""
    below: set[fx.Node] = set()
    for node in graph.nodes:
        if any(x in region or x in below for x in node.all_input_nodes):
            below.add(node)
    above: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(x in region or x in above for x in node.users):
            above.add(node)
    return below & above


def _runs_from(node: fx.Node) -> bool:
    """Whether a way can begin with this value: one tensor, or a number."""
    return isinstance(node.meta.get("val"), Tensor | int | torch.SymInt)


def _graded(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values need a gradient."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        val = node.meta.get("val")
        floating = not isinstance(val, Tensor) or val.is_floating_point() or val.is_complex()
        if node.op == "placeholder":
            requires_grad = isinstance(val, Tensor) and val.requires_grad
        else:
            requires_grad = any(x in nodes for x in node.all_input_nodes) and node.target is not aten.detach.default
        if requires_grad and floating and not mark(node).no_grad:
            nodes.add(node)
    return nodes


def _value(node: fx.Node, graded: bool, place: MeshPlace) -> Value:
    val = node.meta["val"]
    if not isinstance(val, Tensor):
        return Value(None, torch.int64, False, size_hint(val))
    return Value(_local(node, place), val.dtype, graded)


def _local(node: fx.Node, place: MeshPlace) -> tuple[int, ...]:
    """A value's shape on this rank at the example inputs' sizes."""
    shape, layout = tuple(map(size_hint, node.meta["val"].shape)), mark(node).layout
    if layout is None or layout.distribution is None or layout.sharded_dim is None:
        return shape
    d, static = layout.sharded_dim, layout.distribution.static
    length = layout.local_shape(shape, place.size, place.rank)[d] if static else -(-shape[d] // place.size)
    return (*shape[:d], length, *shape[d + 1 :])


def _function(
    graph: fx.Graph,
    region: set[fx.Node],
    leaves: Iterable[fx.Node],
    of: Mapping[fx.Node, fx.Node],
    results: list[fx.Node],
    sends: bool,
) -> fx.GraphModule | None:
    """The nodes of a region as a function of the leaves; `of`: node of this graph -> leaf.

    None where a conversion that changes a value's size is among the nodes, and nothing is to be sent.
    """
    function = fx.Graph()
    inputs = {leaf: function.placeholder(f"x{i}") for i, leaf in enumerate(leaves)}
    env: dict[fx.Node, Any] = {node: inputs[leaf] for node, leaf in of.items()}
    for node in graph.nodes:
        if node not in region or node in env:
            continue
        if sends or mark(node).conversion is None:
            copy_graph([node], env, function)
            continue
        source, target = conversion_of(node)
        if source.split or target.split or source.distribution is not None or target.distribution is not None:
            return None
        env[node] = env[node.args[0]]  # type: ignore[index]
    function.output(tuple(env[node] for node in results))
    return fx.GraphModule({}, function)
