"""Context in which a rule rewrites its operator for the shards of one rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autotp import compat
from autotp.comm.conversions import function_for, local_size
from autotp.errors import PlanError
from autotp.ir.graph import Symbols
from autotp.ir.layouts import Distribution, Groups, Layout, Size, SlotLayouts
from autotp.ir.marks import write
from autotp.ir.op import Factor, Localise, Op, Rule, arguments_of, expression
from autotp.ir.specs import CopiedRuns, Runs

LocalCall = tuple[Any, tuple[Any, ...], dict[str, Any]]

ARITHMETIC = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "PythonMod": operator.mod,
    "CleanDiv": operator.floordiv,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


@dataclass
class Sizes:
    """Nodes of the new graph that hold symbolic sizes; every size is computed from the inputs, which are whole."""

    graph: fx.Graph
    symbols: Symbols
    node_of: dict[Any, fx.Node] = field(default_factory=dict)
    formulas: dict[sympy.Symbol, Callable[[Sizes], fx.Node]] = field(default_factory=dict)  # of further symbols
    equal: Callable[[Sizes, Distribution], Any] | None = None  # what every rank owns of it, where known

    def note(self, node: fx.Node) -> None:
        """Remember a node whose value is a size."""
        val = node.meta.get("val")
        if hasattr(val, "node") and not isinstance(expression(val), int):
            self.node_of.setdefault(expression(val), node)

    def of(self, size: Size) -> int | fx.Node:
        """Return the int, or the node that computes this expression."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        if size not in self.node_of:
            self.node_of[size] = self._compute(size)
        return self.node_of[size]

    def share(self, partition: Distribution) -> Any:
        """Return the share of every rank in a symbolic partition, where it is known to be the same for all."""
        return None if self.equal is None else self.equal(self, partition)

    def convert(self, x: fx.Node, a: Layout, b: Layout, ends: fx.Node | None = None, **options: Any) -> fx.Node:
        """Write the call that converts a value from one layout to another.

        Args:
            x: the value. a, b: the layouts. ends: of the groups by which rows are sharded. options: of the conversion.

        Raises:
            PlanError: there are groups, and no ends.
        """

        def size(n: Any) -> Any:
            if not isinstance(n, Groups):
                return self.of(n)
            if ends is None:
                raise PlanError("the plan shards rows by groups before it is known where the groups end. Plan again.")
            return ends

        src, dst = a.to_runtime(size), b.to_runtime(size)
        return self.graph.call_function(function_for(src, dst), (x, src, dst), options)

    def _compute(self, size: sympy.Expr) -> fx.Node:
        above, below = sympy.fraction(size)
        if below != 1 and below.is_Integer:  # a whole number all the same: half a sequence
            return self.graph.call_function(operator.floordiv, (self.of(above), int(below)))
        if isinstance(size, sympy.Symbol) and size in self.formulas:
            return self.formulas[size](self)
        if isinstance(size, sympy.Symbol) and size in self.symbols:
            return self.graph.call_function(compat.sym_size, self.symbols[size])
        function = ARITHMETIC.get(type(size).__name__)
        if function is None or not size.args:
            raise PlanError(f"the size {size} cannot be computed from the sizes of the inputs")
        first, *rest = (self.of(a) for a in size.args)  # type: ignore[arg-type]
        for term in rest:
            first = self.graph.call_function(function, (first, term))
        return first  # type: ignore[return-value]


@dataclass
class ShardCall:
    """The decision for one operator, and the means to write its local call into the new graph."""

    graph: fx.Graph
    sizes: Sizes
    env: dict[fx.Node, Any]
    operands: list[fx.Node]
    ins: SlotLayouts
    outs: SlotLayouts
    factor: Factor | None
    loop: Distribution | None
    rule: Rule | None
    tp: int

    @property
    def split(self) -> bool:
        """Say whether some operand or result is sharded."""
        return any(x.sharded_dim is not None for x in (*self.ins, *self.outs))

    @property
    def contracted(self) -> bool:
        """Say whether the split loop is one that a result lacks."""
        return self.factor is not None and any(c is None for c in self.factor.outs)

    @property
    def pieces(self) -> Sequence[Distribution] | None:
        """Partitions of the pieces of a cut loop, where that loop is split."""
        if self.factor is None or self.loop is None or not self.factor.pieces:
            return None
        return self.loop.cut(self.factor.pieces, self.tp)

    def out_partition(self, dim: int) -> Distribution | None:
        """Return the partition of a dimension of the first result."""
        return _partition(self.outs[0], dim)

    def in_partition(self, slot: int, dim: int) -> Distribution | None:
        return _partition(self.ins[slot], dim)

    def out_length(self, dim: int, size: Size) -> Any:
        """Return the local length of a dimension of the first result; `size` itself where it is not split."""
        partition = self.out_partition(dim)
        return self.sizes.of(size) if partition is None else self.length(partition)

    def out_shape(self, op: Op) -> list[Any]:
        """Return the local shape of the first result."""
        return [self.out_length(d, n) for d, n in enumerate(op.outs[0])]

    def length(self, partition: Distribution) -> Any:
        """Return the number of elements that this rank owns: an int where all own the same, otherwise a node."""
        if partition.static and partition.even(self.tp):
            return partition.local(0, self.tp)
        even = self.sizes.share(partition)
        return even if even is not None else self.ranked(local_size, self.runs(partition))

    def runs(self, partition: Distribution) -> Runs | CopiedRuns:
        """Return the run-time form of a partition, with nodes for symbolic sizes."""
        return partition.to_runtime(self.sizes.of)

    def arguments(self, op: Op) -> dict[str, Any]:
        """Return the operator's arguments by name, for the new graph."""
        operands = iter(self.operands)

        def new(x: Any) -> Any:
            if x in slots:
                return next(operands)
            return self.env[x] if isinstance(x, fx.Node) else x

        slots = set(op.slots)
        return {name: fx.map_arg(value, new) for name, value in op.args.items()}

    def call(self, op: Op, args: dict[str, Any]) -> LocalCall:
        """Return the local call of the operator with these arguments by name."""
        if not hasattr(op.target, "_schema"):
            return op.target, tuple(args.values()), {}
        arguments = arguments_of(op.target)
        explicit = [args[a.name] != a.default or not a.has_default for a in arguments]
        last = max((i for i, a in enumerate(arguments) if explicit[i] and not a.by_name), default=-1)
        positional = tuple(args[a.name] for a in arguments[: last + 1])
        by_name = [a.name for a, is_explicit in zip(arguments, explicit, strict=True) if is_explicit and a.by_name]
        return op.target, positional, {name: args[name] for name in by_name}

    def unchanged(self, op: Op) -> LocalCall:
        """Make the same call on this rank's operands."""
        return self.call(op, self.arguments(op))

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Write a further call before the operator's own."""
        return self.graph.call_function(target, args, kwargs or {})

    def ranked(self, function: Any, *args: Any) -> fx.Node:
        """Write a call that needs to know its rank (`rank` and `tp` are filled in per rank)."""
        node = self.emit(function, args)
        write(node, axis="tp")
        return node


def _partition(layout: Layout, dim: int) -> Distribution | None:
    return layout.distribution if layout.sharded_dim == dim else None


def local_count(name: str) -> Localise:
    """Make the `localise` of an operator whose argument `name` is the length of the loop "g"."""

    def localise(op: Op, local: ShardCall) -> LocalCall:
        args = local.arguments(op)
        if local.loop is not None and local.factor is not None and local.factor.label == "g":
            args[name] = local.length(local.loop)
        return local.call(op, args)

    return localise
