"""Large products in float8: largest values, casts and products, each with a rule.

A scale is then an operand like any other: where what it is made of is split, it is a maximum over the ranks, and what
is cast before a gather is sent in a byte an element. The recipes are torchao.float8's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from autotp.ir.graph import BUFFER, Capture, before, caller, replace_node
from autotp.ir.marks import mark
from autotp.ir.op import Op, aten
from autotp.ir.precision import DELAYED, HISTORY, LATEST, ROWWISE, ROWWISE_HP, TENSORWISE, Precision
from autotp.ir.scopes import innermost
from autotp.kernels import float8 as _operators  # noqa: F401  defines them
from autotp.kernels.operators import OPS
from autotp.passes.base import Changes, Pass


@dataclass(frozen=True)
class Float8Products(Pass[Capture]):
    """Computes linear layers that are large enough in float8, forward and backward.

    Attributes:
        precision: which, and how; None changes nothing.
    """

    name = "float8-products"
    precision: Precision | None = None

    def idle(self, program: Capture) -> str:
        """Run only where that is asked for."""
        return "" if self.precision is not None else "precision=None"

    def run(self, program: Capture) -> Changes:
        assert self.precision is not None
        if _products(program, self.precision):
            program.own_graph()
        products = _products(program, self.precision)
        writer = WRITERS[self.precision.recipe](program, [node for node, _ in products])
        for node, weight in products:
            writer.replace(node, weight)
        program.write_back(writer.buffer_values())
        linears = len(program.graph.find_nodes(op="call_function", target=aten.linear.default))
        how = f"{len(products)} of {len(products) + linears} linear layers are in float8, {self.precision.recipe}"
        program.notes.append(f"precision: {how}; too small, the last ones or left out: {linears}")
        return Changes(len(products), how)


def _products(program: Capture, precision: Precision) -> list[tuple[fx.Node, str]]:
    """List the products that are to be in float8, in order, with the names of their weights."""
    onward: set[fx.Node] = set()  # what a later product is made of
    products = []
    for node in reversed(program.graph.nodes):
        read = node in onward or any(user in onward for user in node.users)
        linear = node.target is aten.linear.default
        if read or linear:
            onward.add(node)
        if linear and (read or precision.head) and _fits(node):
            weight = program.names.get(_source(node.args[1]), "")
            sizes = node.args[1].meta["val"].shape  # type: ignore[union-attr]
            if precision.takes(weight, *sizes) and WRITERS[precision.recipe].knows(program, weight):
                products.append((node, weight))
    return products[::-1]


def _fits(node: fx.Node) -> bool:
    """Say whether a linear layer multiplies floats, as rows, by a matrix of known sizes."""
    x, weight = (a.meta["val"] for a in Op.of(node).slots[:2])
    if weight.ndim != 2 or x.ndim < 2 or x.dtype != weight.dtype or x.dtype.itemsize < 2 or x.is_complex():
        return False
    return all(isinstance(size, int) for size in weight.shape)


def _source(node: Any) -> fx.Node:
    """Find the leaf behind casts and views of one value."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


# ---- writers ---------------------------------------------------------------------------------------------------------

# What stands for a product in float8, by recipe: where its scales come from, and what the backward is told.


@dataclass
class Writer:
    """Writes what stands for a product in its place; a value that several of them read is measured and cast once."""

    program: Capture
    products: Sequence[fx.Node]
    memo: dict[Any, fx.Node] = field(default_factory=dict)
    target: ClassVar[str]  # name of the product
    reader: ClassVar[str]  # and of what its results are read by: the backward's own largest values come from there

    @classmethod
    def knows(cls, program: Capture, weight: str) -> bool:
        """Say whether the program has what the recipe needs for the product by the weight of this name."""
        return True

    def operands(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> list[fx.Node]:
        """Give the operands of what stands for the product `node` of `x` and the transposed weight, with scales."""
        raise NotImplementedError

    def product(self, call: Any, node: fx.Node, x: fx.Node, weight: fx.Node, name: str) -> fx.Node:
        """Write what stands for the product by the weight of this name, by `call`."""
        return self.read(call, call(getattr(OPS, self.target).default, *self.operands(node, x, weight)))

    def read(self, call: Any, product: fx.Node) -> fx.Node:
        """Write what reads the results of a product, which gives the first of them."""
        reader = getattr(OPS, self.reader).default
        return call(reader, *(call(operator.getitem, product, i) for i in range(len(reader._schema.arguments))))

    def buffer_values(self) -> dict[str, fx.Node]:
        """Give what buffers become, by name; asked after the last product."""
        return {}

    def replace(self, node: fx.Node, name: str) -> None:
        """Put a product in float8 in the place of one by the weight of this name."""
        x, weight, *bias = Op.of(node).slots
        with before(node) as call:
            y = self.product(call, node, x, weight, name)
            y = call(aten.add.Tensor, y, bias[0]) if bias else y
        replace_node(node, y)

    def amax(self, node: fx.Node, x: fx.Node, dims: list[int], keepdim: bool) -> fx.Node:
        """Give the largest absolute value over these dimensions, which carries no gradient."""
        key = x, tuple(dims), mark(node).no_grad
        if key not in self.memo:
            call = self._shared(node, x)
            self.memo[key] = call(OPS.float8_amax.default, call(aten.detach.default, x), dims, keepdim)
        return self.memo[key]

    def whole_amax(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """Take the largest absolute value over all dimensions."""
        return self.amax(node, x, list(range(x.meta["val"].ndim)), False)

    def cast(self, node: fx.Node, x: fx.Node, amax: fx.Node) -> fx.Node:
        """Cast the value to float8."""
        if (x, amax) not in self.memo:
            self.memo[x, amax] = self._shared(node, x)(OPS.float8_cast.default, x, amax)
        return self.memo[x, amax]

    def _shared(self, node: fx.Node, x: fx.Node) -> Any:
        """Give what writes calls in the innermost module of all products that read `x`."""
        stacks = [p.meta.get("nn_module_stack") or {} for p in self.products if x in p.all_input_nodes[:2]]
        return _placed(node, innermost(stack.items() for stack in stacks))


class Tensorwise(Writer):
    """Writes products with a scale for each operand."""

    target, reader = "float8_linear", "float8_seen"

    def operands(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> list[fx.Node]:
        amaxes = [self.whole_amax(node, v) for v in (x, weight)]
        return [self.cast(node, x, amaxes[0]), weight, *amaxes]


class Rowwise(Writer):
    """Writes products with a scale for each row of what is summed over."""

    target, reader = "float8_rows", "float8_rows_seen"

    def operands(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> list[fx.Node]:
        last = x.meta["val"].ndim - 1
        return [
            x, weight, self.amax(node, x, [last], True), self.amax(node, weight, [1], True),
            self.amax(node, x, list(range(last)), False), self.amax(node, weight, [0], False),
        ]  # fmt: skip


class RowwiseHp(Writer):
    """Writes products with a scale for each row, but in those that gradients of weights come from."""

    target, reader = "float8_rows_hp", "float8_row_seen"

    def operands(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> list[fx.Node]:
        rows = self.amax(node, x, [x.meta["val"].ndim - 1], True), self.amax(node, weight, [1], True)
        return [x, weight, *rows, self.whole_amax(node, weight)]


@dataclass
class Delayed(Writer):
    """Writes products with scales by what earlier calls had of each operand; in training a call leaves its largest
    values.

    A layer that is called several times has one history, of the largest values of all its calls.
    """

    reader = "float8_seen"
    largest: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)  # by weight: of its input and itself
    last: dict[str, fx.Node] = field(default_factory=dict)  # by weight: its last product
    histories: dict[str, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.histories = {leaf.name: leaf.node for leaf in self.program.leaves}
        self.program.leaves = [*self.program.leaves]
        for i, leaf in enumerate(self.program.leaves):
            if leaf.name.rpartition(".")[2] in (HISTORY, LATEST):
                self.program.leaves[i] = replace(leaf, kind=BUFFER)

    @classmethod
    def knows(cls, program: Capture, weight: str) -> bool:
        return any(leaf.name == _beside(weight, HISTORY) for leaf in program.leaves)

    def product(self, call: Any, node: fx.Node, x: fx.Node, weight: fx.Node, name: str) -> fx.Node:
        amaxes, fresh = self._before(node, name)
        if ("scale", x) not in self.memo:  # of the input, by the first product which reads it
            self.memo["scale", x] = self._shared(node, x)(aten.select.int, amaxes, 0, 0)
        if self.program.training:
            self._see(call, name, self.whole_amax(node, x), self.whole_amax(node, weight))
        amax = self.memo["scale", x]
        product = call(OPS.float8_delayed.default, self.cast(node, x, amax), weight, amax, amaxes, fresh)
        self.last[name] = self.read(call, product)
        return self.last[name]

    def buffer_values(self) -> dict[str, fx.Node]:
        values = {}
        for name, amaxes in self.largest.items():
            buffers = _beside(name, HISTORY), _beside(name, LATEST)
            with self.program.graph.inserting_before(self.last[name].next):
                call = caller(self.last[name])
                values[buffers[0]] = call(OPS.float8_record.default, *(self.histories[n] for n in buffers), *amaxes)
            values[buffers[1]] = self.memo[name, LATEST]
        return values

    def _see(self, call: Any, name: str, *amaxes: fx.Node) -> None:
        """Note the largest values of a further call of a layer."""
        if name in self.largest:
            pairs = zip(self.largest[name], amaxes, strict=True)
            amaxes = tuple(call(aten.maximum.default, *pair) for pair in pairs)
        self.largest[name] = amaxes

    def _before(self, node: fx.Node, name: str) -> tuple[fx.Node, fx.Node]:
        """Give what earlier calls had, [3], and what this one's backward writes to.

        Both at the program's start: layers and regions that run again in the backward are given those of the first
        time, when the history has moved on.
        """
        if (name, LATEST) not in self.memo:
            graph = self.program.graph
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                call = _placed(node, ())
                history, latest = (self.histories[_beside(name, buffer)] for buffer in (HISTORY, LATEST))
                self.memo[name, HISTORY] = call(OPS.float8_before.default, history, latest)
                self.memo[name, LATEST] = call(aten.zeros_like.default, latest)
        return self.memo[name, HISTORY], self.memo[name, LATEST]


WRITERS: dict[str, type[Writer]] = {TENSORWISE: Tensorwise, ROWWISE: Rowwise, ROWWISE_HP: RowwiseHp, DELAYED: Delayed}


def _beside(weight: str, name: str) -> str:
    """Name the buffer of this name in the module of a weight."""
    return f"{weight.rpartition('.')[0]}.{name}".removeprefix(".")


def _placed(node: fx.Node, levels: Iterable[Any]) -> Any:
    """Give what writes calls at the insertion point as `caller` does, in the module that these levels end in."""
    call = caller(node)

    def placed(function: Any, *args: Any) -> fx.Node:
        new = call(function, *args)
        new.meta["nn_module_stack"] = dict(levels)
        return new

    return placed
