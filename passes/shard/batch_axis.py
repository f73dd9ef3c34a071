"""Planning and rewriting for the batch axis of a mesh: the builder and the rewriter of tp, asked a smaller question."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm import conversions
from autotp.cost.prices import Prices
from autotp.cost.solver.problem import Choice, Item
from autotp.ir.graph import Leaf, draws, outputs_of, resolve, shape_of, substitute, tensors
from autotp.ir.layouts import Distribution, I, Layout, Partition, R, Segment, Shard, divide
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import Factor, Op, Rule, expression, sizes
from autotp.ir.program import Planned
from autotp.rules.core import loops, rule_of
from autotp.rules.local import Sizes

from .planner import Builder
from .rewrite import Rewriter
from .states import States
from .strategies import Candidates

WHOLE = 1e-6  # seconds a byte: work is done on the whole batch only where no rule says how to do it on a slice
QUIET = {"train": False, "dropout_p": 0.0}


class BatchPrices(Prices):
    """Prices that keep slices of the batch apart."""

    batch: sympy.Symbol

    def convert(self, value: Any, a: Layout, b: Layout) -> float | None:
        seconds = super().convert(value, a, b)
        gathers = a.sharded_dim is not None and b.sharded_dim is None
        return seconds if seconds is None or not gathers else seconds + WHOLE * self.bytes(tensors(value[0])[value[1]])

    def operator(
        self, op: Op, ins: tuple[Layout, ...], outs: tuple[Layout, ...], split: Factor | None
    ) -> tuple[float, float]:
        seconds, saved = super().operator(op, ins, outs, split)
        results = zip(tensors(op.node), outs, strict=False)
        whole = [v for v, x in results if x.sharded_dim is None and _has(v, self.batch)]
        return seconds + WHOLE * sum(map(self.bytes, whole)), saved


def _has(val: Tensor, symbol: sympy.Symbol) -> bool:
    return any(symbol in getattr(n, "free_symbols", ()) for n in sizes(val))


class BatchCandidates(Candidates):
    """Every dp rank has at least one example."""

    def full(self, loop: Any) -> bool:
        return True


@dataclass
class BatchBuilder(Builder):
    """The problem of the batch axis: inputs come as slices, weights are whole, outputs stay as they are made."""

    batch: sympy.Symbol = sympy.Symbol("batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = [n for n in self.calls if n.target is not compat.sym_size]  # sizes are known without the values
        for n in filter(draws, self.calls):  # every rank draws for its own slice
            self.rules[n] = rule_of(replace(self.ops[n], args={**self.ops[n].args, **QUIET}))
        self.candidates = BatchCandidates(self.tp)
        p = self.prices
        self.states = States(self.program, self.tp, self.same, self.grads, {}, ignored=True)
        self.prices = BatchPrices(p.program, p.tp, p.cluster, p.grads, p.leaves, keepers=p.keepers)
        self.prices.batch = self.batch

    def sliced(self, leaf: Leaf) -> bool:
        return leaf.kind.passed and shape_of(leaf.node)[:1] == (self.batch,)

    def _seed(self, work: list[fx.Node]) -> None:
        for node, leaf in self.leaves.items():
            if self.sliced(leaf):
                self.candidates.add(((node, 0), 0), Partition.plain(self.batch, self.tp))

    def _leaf(self, node: fx.Node, count: int) -> Item:
        """A weight is Replicate: its gradient is a summand on every rank, which is added up after the backward."""
        leaf = self.leaves[node]
        layout: Layout = I if leaf.kind.passed and node in self.grads else R
        if self.sliced(leaf):
            layout = Shard(0, Partition.plain(self.batch, self.tp))
        return Item(leaf.name, [Choice((), (layout,))], [], [(node, 0)], count)

    def goals(self) -> tuple[Layout, ...]:
        written = {x for i, x in enumerate(compat.tree_leaves(self.program.graph.output_node().args[0]))
                   if i in self.program.mutations and self.program.becomes(i) is None}  # fmt: skip
        return tuple(I if x in written and resolve(x)[0] in self.grads else self._goal(x, x in written)
                     for x in outputs_of(self.program))  # fmt: skip

    def _goal(self, x: fx.Node, written: bool) -> Layout:
        """A slice along the first dimension, where that is the batch; else along one that is, where some is."""
        value, whole = self.value(x), I if resolve(x)[0] in self.grads else R
        shape = sizes(tensors(value[0])[value[1]]) if not written else ()
        unit = divide(shape[0], self.batch) if shape else None
        if unit is not None:
            return Shard(0, Partition.of([Segment(self.batch, unit)], 1, self.tp))
        for d in range(len(shape)):
            for p in self.candidates.of.get((value, d), ()):
                return Shard(d, p)  # type: ignore[arg-type]
        return whole


class BatchSizes(Sizes):
    """Sizes of the whole batch and of a slice, from inputs that are slices."""

    def __init__(self, graph: fx.Graph, batch: sympy.Symbol, dp: int) -> None:
        super().__init__(graph, {})
        self.batch, self.dp = batch, dp
        self.local = sympy.Symbol("local_batch", positive=True, integer=True)

    def share(self, partition: Distribution) -> Any:
        whole = substitute(sympy.sympify(partition.length), {self.batch: self.dp * self.local})  # type: ignore[dict-item]
        return self.of(sympy.cancel(whole / self.dp))

    def _compute(self, size: sympy.Expr) -> fx.Node:
        if size == self.local:
            return self.graph.call_function(compat.sym_size, self.symbols[self.batch])
        if size == self.batch:
            return self.graph.call_function(operator.mul, (self.of(self.local), self.dp))
        return super()._compute(size)


class BatchRewriter(Rewriter):
    """Writes the program of a dp rank, whose inputs are slices."""

    def __init__(self, planned: Planned, builder: BatchBuilder, batch: sympy.Symbol) -> None:
        self.goals = dict(zip(map(resolve, outputs_of(planned.program)), builder.goals(), strict=True))
        self.dp = builder.tp
        super().__init__(planned, builder.prices.convert, "full")
        self.sizes = BatchSizes(self.new, batch, builder.tp)

    def _other(self, node: fx.Node) -> None:
        size = expression(node.meta["val"]) if node.target is compat.sym_size else None
        if size is None:
            super()._other(node)
        else:
            self.env[node] = self.sizes.of(size)

    def _call(self, node: fx.Node) -> None:
        before = next(iter(reversed(self.new.nodes)))
        super()._call(node)
        new = before.next
        while new.op != "root":  # what a rule writes before the operator's own call belongs to the same module
            if new.target not in conversions.FUNCTIONS.values():
                new.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
                write(new, no_grad=mark(node).no_grad)
            new = new.next

    def _goal(self, position: int, x: fx.Node) -> Layout:
        return self.goals[resolve(x)]

    def _outputs(self, node: fx.Node) -> Any:
        """A value that all ranks have whole and alike, such as the loss, is one value: see `scale_gradient`."""
        out = []
        for i, (x, new) in enumerate(zip(compat.tree_leaves(node.args[0]), super()._outputs(node), strict=True)):
            alike = isinstance(x, fx.Node) and tensors(x) and self.goals[resolve(x)] == I
            if alike and i not in self.planned.program.mutations:
                scaled = self.new.call_function(scale_gradient, (new, self.dp))
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
    """The value itself, with a gradient `factor` times as large.

    Gradients over dp are averaged, as those of local losses are whose mean is meant. A loss that is computed over all
    dp ranks has the sum of their gradients as its own, so its gradient is made dp times as large first.
    """
    return _Scaled.apply(x, factor)  # type: ignore[return-value]


def across(op: Op) -> Rule:
    """The tp rule of a conversion over another mesh axis: every dimension that it leaves alone splits."""
    specs: list[Any] = [spec for spec in op.node.args[1:] if isinstance(spec, tuple)]
    touched = {spec.dim for spec in specs}
    labels = [d if d not in touched else None for d in range(len(op.outs[0]))]
    linear = (frozenset({0}),) if all(spec.reduction == "sum" for spec in specs) else ()
    return loops(op, [labels], [labels], linear=linear)


for _function in (*conversions.FUNCTIONS.values(), scale_gradient):
    _function.rule = across  # type: ignore[attr-defined]
