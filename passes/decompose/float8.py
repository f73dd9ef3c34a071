"""Large products in float8 with dynamic scales: largest values, casts and products, each with a rule.

A scale is then an operand like any other: where what it is made of is split, it is a maximum over the ranks, and what
is cast before a gather is sent in a byte an element. The recipes are torchao.float8's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from autotp.ir.graph import Capture, caller
from autotp.ir.marks import mark
from autotp.ir.op import Op, aten
from autotp.ir.precision import ROWWISE, Precision
from autotp.kernels import float8 as _operators  # noqa: F401  defines them
from autotp.kernels.operators import OPS
from autotp.passes.base import Changes, Pass


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
        weights = {leaf.node: leaf.name for leaf in program.leaves}
        chosen = _chosen(program.graph, self.precision, weights)
        if chosen:
            program.own_graph()
            chosen = _chosen(program.graph, self.precision, {leaf.node: leaf.name for leaf in program.leaves})
        writer = _Writer(program.graph, chosen, self.precision.recipe == ROWWISE)
        for node in chosen:
            writer.replace(node)
        linears = len(program.graph.find_nodes(op="call_function", target=aten.linear.default))
        how = f"{len(chosen)} of {len(chosen) + linears} linear layers are in float8, {self.precision.recipe}"
        program.notes.append(f"precision: {how}; too small, the last ones or left out: {linears}")
        return Changes(len(chosen), how)


def _chosen(graph: fx.Graph, precision: Precision, names: dict[fx.Node, str]) -> list[fx.Node]:
    """The products that are to be in float8, in order."""
    onward: set[fx.Node] = set()  # what a later product is made of
    found = []
    for node in reversed(graph.nodes):
        read = node in onward or any(user in onward for user in node.users)
        linear = node.target is aten.linear.default
        if read or linear:
            onward.add(node)
        if linear and (read or precision.head) and _fits(node, precision, names):
            found.append(node)
    return found[::-1]


def _fits(node: fx.Node, precision: Precision, names: dict[fx.Node, str]) -> bool:
    """Whether a linear layer multiplies floats, as rows, by a weight that the recipe takes."""
    x, weight = (a.meta["val"] for a in Op.of(node).slots[:2])
    if weight.ndim != 2 or x.ndim < 2 or x.dtype != weight.dtype or x.dtype.itemsize < 2 or x.is_complex():
        return False
    n, k = weight.shape
    sized = isinstance(n, int) and isinstance(k, int)
    return sized and precision.takes(names.get(_source(node.args[1]), ""), n, k)  # type: ignore[arg-type]


def _source(node: Any) -> fx.Node:
    """The leaf behind casts and views of one value."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


@dataclass
class _Writer:
    """Writes what stands for a product in its place; a value that several of them read is measured and cast once."""

    graph: fx.Graph
    products: Sequence[fx.Node]
    rows: bool
    known: dict[Any, fx.Node] = field(default_factory=dict)

    def replace(self, node: fx.Node) -> None:
        x, weight, *bias = Op.of(node).slots
        call = caller(self.graph, node)
        with self.graph.inserting_before(node):
            y = self._rowwise(call, node, x, weight) if self.rows else self._tensorwise(call, node, x, weight)
            y = call(aten.add.Tensor, y, bias[0]) if bias else y
        node.replace_all_uses_with(y)
        self.graph.erase_node(node)

    def _tensorwise(self, call: Any, node: fx.Node, x: fx.Node, weight: fx.Node) -> fx.Node:
        every = [list(range(v.meta["val"].ndim)) for v in (x, weight)]
        amaxes = [self.amax(node, v, d, False) for v, d in zip((x, weight), every, strict=True)]
        product = call(OPS.float8_linear.default, self.cast(node, x, amaxes[0]), weight, *amaxes)
        y, zero = (call(operator.getitem, product, i) for i in range(2))
        return call(OPS.float8_seen.default, y, zero)

    def _rowwise(self, call: Any, node: fx.Node, x: fx.Node, weight: fx.Node) -> fx.Node:
        last = x.meta["val"].ndim - 1
        amaxes = [
            self.amax(node, x, [last], True), self.amax(node, weight, [1], True),
            self.amax(node, x, list(range(last)), False), self.amax(node, weight, [0], False),
        ]  # fmt: skip
        product = call(OPS.float8_rows.default, x, weight, *amaxes)
        return call(OPS.float8_rows_seen.default, *(call(operator.getitem, product, i) for i in range(3)))

    def amax(self, node: fx.Node, x: fx.Node, dims: list[int], keepdim: bool) -> fx.Node:
        """The largest absolute value over these dimensions, which carries no gradient."""
        key = x, tuple(dims), mark(node).no_grad
        if key not in self.known:
            call = self._shared(node, x)
            self.known[key] = call(OPS.float8_amax.default, call(aten.detach.default, x), dims, keepdim)
        return self.known[key]

    def cast(self, node: fx.Node, x: fx.Node, amax: fx.Node) -> fx.Node:
        """The value in float8."""
        if (x, amax) not in self.known:
            self.known[x, amax] = self._shared(node, x)(OPS.float8_cast.default, x, amax)
        return self.known[x, amax]

    def _shared(self, node: fx.Node, x: fx.Node) -> Any:
        """Writes calls in the innermost module of all products that read `x`."""
        call = caller(self.graph, node)
        stack = _common([p.meta.get("nn_module_stack") or {} for p in self.products if x in p.all_input_nodes[:2]])

        def placed(function: Any, *args: Any) -> fx.Node:
            new = call(function, *args)
            new.meta["nn_module_stack"] = dict(stack)
            return new

        return placed


def _common(stacks: Iterable[dict[Any, Any]]) -> list[tuple[Any, Any]]:
    """The levels that all module stacks begin with."""
    shared = []
    for level in zip(*(stack.items() for stack in stacks), strict=False):
        if any(entry != level[0] for entry in level):
            break
        shared.append(level[0])
    return shared
