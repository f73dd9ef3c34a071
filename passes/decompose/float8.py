"""Large products in float8: largest values, casts and products, each with a rule.

A scale is then an operand like any other: where what it is made of is split, it is a maximum over the ranks, and what
is cast before a gather is sent in a byte an element. The recipes are torchao.float8's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autotp.ir.graph import Capture
from autotp.ir.op import Op, aten
from autotp.ir.precision import Precision
from autotp.passes.base import Changes, Pass

from .float8_writers import WRITERS


@dataclass(frozen=True)
class Float8Products(Pass[Capture]):
    """Linear layers that are large enough are computed in float8, forward and backward.

    Attributes:
        precision: which, and how; None changes nothing.
    """

    name: ClassVar[str] = "float8-products"
    precision: Precision | None = None

    def idle(self, program: Capture) -> str:
        """Only where that is asked for."""
        return "" if self.precision is not None else "precision=None"

    def run(self, program: Capture) -> Changes:
        assert self.precision is not None
        if _products(program, self.precision):
            program.own_graph()
        products = _products(program, self.precision)
        writer = WRITERS[self.precision.recipe](program, [node for node, _ in products])
        for node, weight in products:
            writer.replace(node, weight)
        writer.finish()
        linears = len(program.graph.find_nodes(op="call_function", target=aten.linear.default))
        how = f"{len(products)} of {len(products) + linears} linear layers are in float8, {self.precision.recipe}"
        program.notes.append(f"precision: {how}; too small, the last ones or left out: {linears}")
        return Changes(len(products), how)


def _products(program: Capture, precision: Precision) -> list[tuple[fx.Node, str]]:
    """The products that are to be in float8, in order, with the names of their weights."""
    names = {leaf.node: leaf.name for leaf in program.leaves}
    onward: set[fx.Node] = set()  # what a later product is made of
    products = []
    for node in reversed(program.graph.nodes):
        read = node in onward or any(user in onward for user in node.users)
        linear = node.target is aten.linear.default
        if read or linear:
            onward.add(node)
        if linear and (read or precision.head) and _fits(node):
            weight = names.get(_source(node.args[1]), "")
            sizes = node.args[1].meta["val"].shape  # type: ignore[union-attr]
            if precision.takes(weight, *sizes) and WRITERS[precision.recipe].knows(program, weight):
                products.append((node, weight))
    return products[::-1]


def _fits(node: fx.Node) -> bool:
    """Whether a linear layer multiplies floats, as rows, by a matrix of known sizes."""
    x, weight = (a.meta["val"] for a in Op.of(node).slots[:2])
    if weight.ndim != 2 or x.ndim < 2 or x.dtype != weight.dtype or x.dtype.itemsize < 2 or x.is_complex():
        return False
    return all(isinstance(size, int) for size in weight.shape)


def _source(node: Any) -> fx.Node:
    """The leaf behind casts and views of one value."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
