"""Adapters in a captured graph: trained operators beside a frozen product of activations and a weight.

A low-rank pair is one form of it: `W x + B A x`, W frozen. What is read is which weights train, and that both sides of
a sum are made of the same value; no name, and no library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from autotp.ir.op import Op


class Flow(Protocol):
    """What is read of `dataflow.Dataflow`, whose docstrings hold."""

    @property
    def ops(self) -> Mapping[fx.Node, Op]: ...
    @property
    def order(self) -> Mapping[fx.Node, int]: ...
    @property
    def weights(self) -> Collection[fx.Node]: ...
    @property
    def adapted(self) -> Collection[fx.Node]: ...
    @property
    def roots(self) -> Mapping[fx.Node, Iterable[tuple[fx.Node, tuple[object, ...]]]]: ...
    def inputs(self, node: fx.Node) -> list[fx.Node]: ...
    def parameters(self, node: fx.Node) -> list[fx.Node]: ...
    def passes(self, node: fx.Node) -> bool: ...
    def together(self, node: fx.Node) -> bool: ...
    def weighted(self, node: fx.Node) -> bool: ...


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a frozen product.

    Attributes:
        base: the frozen product.
        nodes: the adapter's operators, in the order of the graph; none that the product's own result passes through,
            but for one that scales it.
        products: those of `nodes` that multiply activations by a trained matrix.
    """

    base: fx.Node
    nodes: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]


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
    products = [n for n in nodes if flow.weighted(n) and any(map(_trained, flow.parameters(n)))]
    return Adapter(base, tuple(nodes), tuple(products)) if products else None


def scaled(flow: Flow, node: fx.Node) -> Adapter | None:
    """The adapter that a trained parameter is by which the result of a frozen product is multiplied; or None."""
    op = flow.ops[node]
    sides, vectors = flow.inputs(node), flow.parameters(node)
    if len(op.slots) != 2 or len(sides) != 1 or len(vectors) != 1 or not _trained(vectors[0]) or flow.together(node):
        return None
    made_of = {n for n, _ in flow.roots[sides[0]]}
    base = next(iter(made_of))
    return Adapter(base, (node,), ()) if len(made_of) == 1 and frozen(flow, base) else None


def frozen(flow: Flow, node: fx.Node) -> bool:
    """Whether an operator multiplies activations by a matrix that is not trained."""
    matrices = [p for p in flow.parameters(node) if p.meta["val"].ndim > 1]
    return bool(matrices) and not any(map(_trained, matrices)) and flow.weighted(node)


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
