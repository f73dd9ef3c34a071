"""The batch axis of a mesh, for planner and rewriter: what leaves, outputs and gathering are there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm import conversions
from autotp.errors import CaptureError
from autotp.inputs import Inputs, mapped
from autotp.ir.graph import Capture, Leaf, Value, draws, outputs_of, resolve, shape_of, tensor_at, tensors, where
from autotp.ir.layouts import (
    Distribution,
    I,
    Layout,
    Layouts,
    Partition,
    R,
    Segment,
    Shard,
    Size,
    SlotLayouts,
    Travelled,
    divide,
)
from autotp.ir.marks import Axis, BatchConversion, inherit, mark, write
from autotp.ir.op import Carry, Factor, Op, Rule, expression, sizes, symbols_of
from autotp.ir.program import Planned
from autotp.ir.sizes import substitute
from autotp.ir.specs import ShardSpec
from autotp.rules.core import loops, rule_of, with_factors
from autotp.rules.local import ShardCall, Sizes
from autotp.text import listed

from .axis import AxisRules, AxisWriter, Partitions, Result, Seed, results

INNER = "inner"  # the loop of a conversion over parts of which each tp rank has one
WHOLE = 1e-6  # seconds a byte: work is done on the whole batch only where no rule says how to do it on a slice
QUIET = {"train": False, "dropout_p": 0.0}


@dataclass(frozen=True)
class Apart:
    """Surcharge that keeps slices of the batch: gathering one costs more than anything else, and so does work on the
    whole."""

    batch: sympy.Symbol

    def operator(self, op: Op, outs: SlotLayouts, nbytes: Callable[[Tensor], float]) -> float:
        results = zip(tensors(op.node), outs, strict=False)
        whole = [v for v, x in results if x.sharded_dim is None and has(sizes(v), self.batch) and self.counts(v)]
        return WHOLE * sum(map(nbytes, whole))

    def counts(self, value: Tensor) -> bool:
        """Say whether a value of the whole batch is too much."""
        return True

    def conversion(self, a: Layout, b: Layout, nbytes: float) -> float:
        return WHOLE * nbytes if a.sharded_dim is not None and b.sharded_dim is None else 0.0


def has(shape: Iterable[Size], symbol: sympy.Symbol) -> bool:
    """Say whether a size of the shape is made of this symbol."""
    return any(symbol in getattr(n, "free_symbols", ()) for n in shape)


@dataclass(frozen=True)
class BatchRules(AxisRules):
    """The batch axis: inputs come as slices, weights are whole, outputs stay as they are made."""

    axis: ClassVar[Axis] = "dp"
    by_examples: ClassVar[bool] = True  # rows of different ranks are of different examples
    ignores_states = True
    batch: sympy.Symbol

    @classmethod
    def symbol(cls, program: Capture) -> sympy.Symbol:
        """Find the size that is sharded, here the batch: the first input's first dimension. Equal sizes become one
        symbol, in the program.

        Raises:
            CaptureError: there is none, or it cannot be sharded.
        """
        firsts = [leaf for leaf in program.inputs if shape_of(leaf.node)]
        batch = shape_of(firsts[0].node)[0] if firsts else None
        if not isinstance(batch, sympy.Symbol):
            raise CaptureError(
                "with dp the first dimension of the first input is the batch, of any size, and this model was captured "
                f"for one size of it ({batch}; the plan's notes say why). Use dp=1, and a data parallelism around the "
                "module."
            )
        for leaf in firsts[1:]:
            other = shape_of(leaf.node)[0]
            if isinstance(other, int) and other == program.hints[batch]:
                raise CaptureError(
                    f"with dp the batch may have any size, and this model was captured for {other} of the input "
                    f"{leaf.name!r} alone. Use dp=1 and a data parallelism around the module; or where that is not the "
                    "batch's dimension, example inputs with another batch size."
                )
        return one_symbol(program, firsts, 0)

    @classmethod
    def of(cls, program: Capture, symbol: sympy.Symbol, ranks: int, inner: int) -> BatchRules:
        """Make them for a program.

        Args:
            program: of whole inputs; may be changed. symbol: of the size that is sharded. ranks: of the axis.
            inner: ranks of tp, which will split heads first.
        """
        return cls(symbol)

    @classmethod
    def conversions(cls, program: Capture) -> list[tuple[fx.Node, BatchConversion]]:
        """List the conversions over this axis; a program that was sharded over another has some of that too."""
        nodes = program.graph.nodes
        return [(n, over) for n in nodes if (over := mark(n).batch) is not None and over.axis == cls.axis]

    @classmethod
    def needs_same_sizes(cls, program: Capture) -> bool:
        """Say whether ranks exchange values that are as long as their inputs, which must then be so on all."""
        batch = next((shape_of(leaf.node)[0] for leaf in program.inputs if shape_of(leaf.node)), None)
        for node, over in cls.conversions(program):
            shapes = [] if isinstance(over.source, Travelled) or isinstance(over.target, Travelled) else tensors(node)
            if any(symbols_of(n) - {batch} for shape in map(sizes, shapes) for n in shape):
                return True
        return False

    def settle(self, program: Capture, planned: Planned, inputs: Layouts) -> list[str]:
        """Check what was decided, and say in words what changes hands.

        Args:
            program: of one rank by now. planned: that of all. inputs: those that come in parts.
        """
        gathered = [n.all_input_nodes[0] for n, b in self.conversions(program) if b.source.sharded_dim is not None]
        after = listed(map(where, gathered))
        return [f"over dp the whole batch is gathered after: {after}. What reads it mixes examples"] if gathered else []

    @property
    def surcharge(self) -> Apart:
        return Apart(self.batch)

    def decides(self, node: fx.Node) -> bool:
        return node.target is not compat.sym_size  # sizes are known without the values

    def rule(self, op: Op) -> Rule | None:
        """Read the rule; every rank draws for its own slice, so drawing operators split as they do without drawing."""
        return rule_of(replace(op, args={**op.args, **QUIET}) if draws(op.node) else op)

    def fills(self, loop: Distribution, ranks: int) -> bool:
        return True  # every dp rank has at least one example

    def seeds(self, leaves: Iterable[Leaf], ranks: int) -> list[Seed]:
        return [(leaf.node, self.at(leaf), self.partition(ranks)) for leaf in leaves if self.sliced(leaf)]

    def leaf(self, leaf: Leaf, graded: bool, ranks: int) -> Layout:
        """Give weights Replicate: their gradients are summands on every rank, which are added up after the backward."""
        if self.sliced(leaf):
            return Shard(self.at(leaf), self.partition(ranks))
        return I if leaf.kind.passed and graded else R

    def sliced(self, leaf: Leaf) -> bool:
        """Say whether the leaf comes as a slice of the batch."""
        return leaf.kind.passed and shape_of(leaf.node)[:1] == (self.batch,)

    def at(self, leaf: Leaf) -> int:
        """Give the dimension of such a leaf that is sharded."""
        return 0

    def partition(self, ranks: int) -> Partition:
        """Say which slice of that dimension each rank has."""
        return Partition.plain(self.batch, ranks)

    def outputs(self, program: Capture, grads: Set[fx.Node], ranks: int, partitions: Partitions) -> SlotLayouts:
        writes = {x for i, x in enumerate(program.results) if i in program.mutations and program.becomes(i) is None}
        layouts = []
        for x in outputs_of(program):
            whole = I if resolve(x)[0] in grads else R
            layouts.append(whole if x in writes else self._output(x, whole, ranks, partitions))
        return tuple(layouts)

    def _output(self, x: fx.Node, whole: Layout, ranks: int, partitions: Partitions) -> Layout:
        """Shard the first dimension, where that is the batch; else one that is, where some is."""
        shape = sizes(tensor_at(resolve(x)))
        unit = divide(shape[0], self.batch) if shape else None
        if unit is not None:
            return Shard(0, Partition.of([Segment(self.batch, unit)], 1, ranks))
        for d in range(len(shape)):
            for p in partitions(x, d):
                return Shard(d, p)  # type: ignore[arg-type]
        return whole


@dataclass(frozen=True)
class BatchWriter(AxisWriter):
    """Writes the program of a dp rank, whose inputs are slices, and whose outputs have these `layouts`."""

    batch: sympy.Symbol
    dp: int
    layouts: Mapping[Value, Layout]
    rereads: bool = True

    def sizes(self, graph: fx.Graph) -> Sizes:
        """Make sizes of the whole batch and of a slice, from inputs that are slices."""
        batch, dp, local = self.batch, self.dp, sympy.Symbol("local_batch", positive=True, integer=True)

        def read(sizes: Sizes) -> fx.Node:
            return graph.call_function(compat.sym_size, sizes.symbols[batch])

        def whole(sizes: Sizes) -> fx.Node:
            return graph.call_function(operator.mul, (sizes.of(local), dp))

        def equal(sizes: Sizes, partition: Distribution) -> Any:
            length = substitute(sympy.sympify(partition.length), {batch: dp * local})  # type: ignore[dict-item]
            return sizes.of(sympy.cancel(length / dp))

        return Sizes(graph, {}, formulas={local: read, batch: whole}, equal=equal)

    def results(self, planned: Planned) -> list[Result]:
        return results(planned, lambda position, x: self.layouts[resolve(x)])

    def emitted(self, node: fx.Node, new: Iterable[fx.Node]) -> None:
        """Put what a rule writes before the operator's own call into the same module."""
        for call in new:
            if call.target not in conversions.FUNCTIONS.values():
                call.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
                write(call, no_grad=mark(node).no_grad)

    def leave(self, graph: fx.Graph, planned: Planned, values: Sequence[Any]) -> tuple[Any, ...]:
        """Scale the gradient of values that all ranks have whole and alike, such as the loss: see `scale_gradient`."""
        out = []
        for i, (result, new) in enumerate(zip(self.results(planned), values, strict=True)):
            if result.layout == I and i not in planned.program.mutations:
                scaled = graph.call_function(scale_gradient, (new, self.dp))
                inherit(scaled, new, axis=None, conversion=None)
                new = scaled
            out.append(new)
        return tuple(out)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone()  # no view: users may change what a model returns in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: int) -> Tensor:
    """Give the value itself, with a gradient `factor` times as large.

    Gradients over dp are averaged, as those of local losses are whose mean is meant. A loss that is computed over all
    dp ranks has the sum of their gradients as its own, so its gradient is made dp times as large first.
    """
    return _Scaled.apply(x, factor)  # type: ignore[return-value]


def across(op: Op) -> Rule:
    """Write the tp rule of a conversion over another mesh axis: every dimension that it leaves alone splits."""
    specs: list[Any] = [spec for spec in op.node.args[1:] if isinstance(spec, tuple)]
    touched = {spec.dim for spec in specs}
    labels: list[int | None] = list(range(len(op.outs[0])))
    for d in touched - {None}:
        labels[d] = None
    sums = all(spec.reduction == "sum" for spec in specs)
    linear = (frozenset({0}),) if sums else ()
    whole = [[None] * len(shape) for shape in op.ins[1:]]  # numbers that a layout holds
    base = loops(op, [labels, *whole], [labels], linear=linear)
    return replace(with_factors(base, _inner(op, specs)), localise=_local_conversion)


def _inner(op: Op, specs: list[Any]) -> Iterator[Factor]:
    """Yield loops over parts of a dimension that are each sharded over the other axis: tp ranks have one each."""
    over = mark(op.node).batch
    if over is None or over.inner == 1 or len({spec.dim for spec in specs}) != len(specs):
        return
    for i, spec in enumerate(specs):
        if not isinstance(spec, ShardSpec) or len(spec.segments) != 1:
            continue
        if all(isinstance(n, int) for n in (spec.repeat, *spec.segments[0])):
            (count, unit), times = spec.segments[0][:2], divide(spec.repeat, over.inner)
            if times is not None and count % over.ranks == 0:
                sizes = [count // over.ranks * unit, count * unit]
                before, after = sizes if i == 0 else sizes[::-1]  # the source is a slice of it, or the result
                carried = (Carry(spec.dim, times, before),), (Carry(spec.dim, times, after),)
                yield Factor(over.inner, *carried, label=INNER)


def _local_conversion(op: Op, local: ShardCall) -> Any:
    """Write the conversion of a tp rank's slice."""
    operands = {**local.env, **dict(zip(op.slots, local.operands, strict=True))}
    args: list[Any] = [fx.map_arg(a, lambda n: operands.get(n, n)) for a in op.node.args]
    if local.factor is not None and local.factor.label == INNER:
        dims = [c.dim for c in local.factor.outs if c is not None]
        for i, spec in enumerate(args):
            if isinstance(spec, ShardSpec) and spec.dim in dims:
                args[i] = spec._replace(repeat=spec.repeat // local.tp)
    return op.target, tuple(args), dict(op.node.kwargs)


for _function in (*conversions.FUNCTIONS.values(), scale_gradient):
    _function.rule = across  # type: ignore[attr-defined]


def two_examples(inputs: Inputs, dp: int) -> Inputs:
    """Repeat the example of inputs that have only one: that would be captured as no batch at all."""
    first = next((x for x in inputs.tensors if x.ndim), None)
    if dp == 1 or first is None or first.shape[0] != 1:
        return inputs

    def repeat(x: Tensor) -> Tensor:
        return torch.cat([x.detach()] * 2).requires_grad_(x.requires_grad) if x.shape[:1] == (1,) else x

    return mapped(inputs, repeat)


def one_symbol(program: Capture, leaves: Sequence[Leaf], dim: int) -> sympy.Symbol:
    """Merge equal sizes of this dimension into one symbol, that of the first; and sizes that guards say are equal.

    Args:
        program: is changed. leaves: inputs with that dimension, the first of which has a symbol there.
    """
    for leaf in leaves[1:]:
        first, other = cast(sympy.Symbol, shape_of(leaves[0].node)[dim]), shape_of(leaf.node)[dim]
        if other != first and isinstance(other, sympy.Symbol) and program.hints[other] == program.hints[first]:
            _unify(program, other, first)
    while (pair := next(_equal_symbols(program), None)) is not None:
        _unify(program, *pair)
    return cast(sympy.Symbol, shape_of(leaves[0].node)[dim])


def _equal_symbols(program: Capture) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Yield pairs of symbols that a guard says are equal, such as Eq(batch * length, batch * length of the labels)."""
    for guard in program.guards:
        if isinstance(guard, sympy.Eq):
            sides: Any = guard
            above, below = sympy.cancel(sides.lhs / sides.rhs).as_numer_denom()
            if {above, below} <= program.symbols.keys():
                yield below, above


def _unify(program: Capture, one: sympy.Symbol, other: sympy.Symbol) -> None:
    """Replace two symbols of equal sizes by one of them, in all values of the program."""
    sides = [node.meta["val"].shape[d] for node, d in (program.symbols[one], program.symbols[other])]
    torch._check(sides[0] == sides[1])
    survivor: Any = expression(sides[0])
    duplicate = other if survivor == one else one
    program.symbols.pop(duplicate)
    program.hints.pop(duplicate)
    guards = [g.subs(duplicate, survivor) for g in program.guards]
    program.guards[:] = [g for g in guards if g != sympy.true]
