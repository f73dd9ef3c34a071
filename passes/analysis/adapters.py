"""Adapters in a captured graph: trained operators beside a frozen product of activations and a weight, or before it.

A low-rank pair is one form of it: `W x + B A x`, W frozen; a rotation another: `W (R x)`, R made of trained weights.
What is read is which weights train, and that both sides of a sum are made of the same value; no name, and no library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from autotp.ir.graph import short_name
from autotp.ir.layouts import Size
from autotp.ir.op import Op

LOOKUPS = {"aten.embedding", "aten.index_select", "aten.gather", "aten.index.Tensor"}


class Flow(Protocol):
    """What is read of `dataflow.Dataflow`, whose docstrings hold."""

    @property
    def ops(self) -> Mapping[fx.Node, Op]: ...
    @property
    def order(self) -> Mapping[fx.Node, int]: ...
    @property
    def weights(self) -> Mapping[fx.Node, fx.Node]: ...
    @property
    def own(self) -> Collection[fx.Node]: ...
    @property
    def adapted(self) -> Collection[fx.Node]: ...
    @property
    def roots(self) -> Mapping[fx.Node, Iterable[tuple[fx.Node, tuple[object, ...]]]]: ...
    def inputs(self, node: fx.Node) -> list[fx.Node]: ...
    def parameters(self, node: fx.Node) -> list[fx.Node]: ...
    def passes(self, node: fx.Node) -> bool: ...
    def together(self, node: fx.Node) -> bool: ...
    def weighted(self, node: fx.Node) -> bool: ...
    def contraction(self, node: fx.Node) -> bool: ...
    def width(self, node: fx.Node) -> Size: ...


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a frozen product, or before it.

    Attributes:
        base: the frozen product, or the frozen lookup.
        nodes: the adapter's operators, in the order of the graph; none that the product's own result passes through,
            but for one that scales it.
        where: "beside" where its result is added to that of `base`, "scales" where it multiplies that, and "before"
            where it multiplies what `base` reads.
        rank: the least width of its products, where it has several.
    """

    base: fx.Node
    nodes: tuple[fx.Node, ...]
    where: str
    rank: Size | None = None


def added(flow: Flow, node: fx.Node, made_of: Iterable[fx.Node]) -> Adapter | None:
    """The adapter whose result a sum adds to that of a frozen product; None where it adds something else.

    Args:
        flow: of the operators before the sum.
        node: the sum; `made_of`: the roots of its operands.
    """
    op = flow.ops[node]
    bases = [n for n in made_of if frozen(flow, n)]
    if len(bases) != 1 or any(shape != op.outs[0] for shape in op.ins):
        return None
    base = bases[0]
    region = _between(flow, node, base, _source(flow, base))
    nodes = []
    for n in region or ():  # what reads the base product itself is behind the sum, not beside it
        if base not in {r for r, _ in flow.roots.get(n, ())}:
            nodes.append(n)
    widths = _widths(flow, nodes)
    rank = min(widths, key=int) if len(widths) > 1 else None
    return Adapter(base, tuple(nodes), "beside", rank) if widths else None


def looked_up(flow: Flow, node: fx.Node) -> Adapter | None:
    """The adapter whose result a sum adds to rows of a frozen table, both looked up by the same indices; or None."""
    op = flow.ops[node]
    tables = [s for s in op.slots if frozen_table(flow, s)]
    others = [s for s in op.slots if s not in tables]
    if len(tables) != 1 or len(others) != 1 or any(shape != op.outs[0] for shape in op.ins):
        return None
    indices = {s for s in flow.ops[tables[0]].slots if s not in flow.weights}
    nodes = _of_weights(flow, others[0], indices)
    if nodes is None or tables[0] in nodes or not any(indices & {*n.all_input_nodes} for n in nodes):
        return None  # what is made of the rows themselves is a layer behind the table
    return Adapter(tables[0], tuple(nodes), "beside", min(_widths(flow, nodes), key=int, default=None))


def turned(flow: Flow, base: fx.Node) -> Adapter | None:
    """The adapter that multiplies what a frozen product reads, with nothing but views between them; or None.

    The last of its operators is that product; it is of what the weights alone make, and of what comes in.
    """
    inputs = flow.inputs(base) if frozen(flow, base) else []
    if len(inputs) != 1:
        return None
    node = inputs[0]
    while node in flow.ops and flow.passes(node) and len(flow.ops[node].slots) == 1:
        node = flow.ops[node].slots[0]
    if node not in flow.ops or not flow.contraction(node) or len(flow.ops[node].slots) != 2:
        return None
    sides = [_of_weights(flow, s, set()) for s in flow.ops[node].slots]
    matrix = [nodes for nodes in sides if nodes]  # a weight by itself would be a layer's
    return Adapter(base, (*matrix[0], node), "before") if len(matrix) == 1 else None


def scaled(flow: Flow, node: fx.Node) -> Adapter | None:
    """The adapter that a trained parameter is by which the result of a frozen product is multiplied; or None."""
    op = flow.ops[node]
    sides, vectors = flow.inputs(node), flow.parameters(node)
    if len(op.slots) != 2 or len(sides) != 1 or len(vectors) != 1 or not _trained(vectors[0]) or flow.together(node):
        return None
    made_of = {n for n, _ in flow.roots[sides[0]]}
    base = next(iter(made_of))
    return Adapter(base, (node,), "scales") if len(made_of) == 1 and frozen(flow, base) else None


def frozen(flow: Flow, node: fx.Node) -> bool:
    """Whether an operator multiplies activations by a matrix that is not trained."""
    matrices = [p for p in flow.parameters(node) if p.meta["val"].ndim > 1]
    return bool(matrices) and not any(map(_trained, matrices)) and flow.weighted(node)


def frozen_table(flow: Flow, node: fx.Node) -> bool:
    """Whether an operator looks rows up in a matrix that is not trained."""
    tables = flow.parameters(node)
    return node in flow.ops and short_name(node.target) in LOOKUPS and bool(tables) and not any(map(_trained, tables))


def _widths(flow: Flow, nodes: Iterable[fx.Node]) -> list[Size]:
    """Of those that multiply activations by a trained matrix."""
    return [flow.width(n) for n in nodes if flow.weighted(n) and any(map(_trained, flow.parameters(n)))]


def _of_weights(flow: Flow, start: fx.Node, others: Collection[fx.Node]) -> list[fx.Node] | None:
    """The operators that make a value of trained weights, the module's own tensors, and `others`.

    None where it is made of more than these, or of nothing that is trained.
    """
    visited: set[fx.Node] = set()
    work, trained = [start], False
    while work:
        n = work.pop()
        if n in flow.weights:
            trained |= _trained(flow.weights[n])
        elif n in visited or n in others or n in flow.own or n.op == "get_attr":
            continue
        elif n.op != "call_function":
            return None
        else:
            visited.add(n)
            work += n.all_input_nodes
    return sorted(visited, key=flow.order.__getitem__) if trained else None


def _trained(leaf: fx.Node) -> bool:
    return leaf.meta["val"].requires_grad


def _source(flow: Flow, base: fx.Node) -> set[fx.Node]:
    """The activations that a product reads, and what they are a view or a cast of."""
    source: set[fx.Node] = set()
    work = flow.inputs(base)
    while work:
        n = work.pop()
        source.add(n)
        if n in flow.ops and flow.passes(n) and len(flow.ops[n].slots) == 1:
            work += flow.inputs(n)
    return source


def _between(flow: Flow, node: fx.Node, base: fx.Node, source: set[fx.Node]) -> list[fx.Node] | None:
    """The operators behind a sum up to a product and what that reads; None where the sum is made of more than these."""
    start = min((flow.order[n] for n in source), default=len(flow.order))
    ends = {base, *source, *flow.adapted}
    between: set[fx.Node] = set()
    work = list(node.all_input_nodes)

    def foreign(n: fx.Node) -> bool:
        return n.op != "call_function" or flow.order[n] < start or frozen(flow, n)

    while work:
        n = work.pop()
        if n in between or n in ends or n in flow.weights or n.op == "get_attr":
            continue
        if foreign(n):
            return None
        between.add(n)
        work += n.all_input_nodes
    return sorted(between, key=flow.order.__getitem__)
