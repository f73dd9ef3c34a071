"""The sequence axis of a mesh, for planner and rewriter: what is dealt there, and attention whose queries are.

Weights are replicated over it and the sequence is dealt, so the solver's choice is at operators that mix tokens:
convert what they read to slices of another dimension (of heads: Ulysses, Jacobs et al. 2023) and back, or gather what
all queries read (keys and values: Llama 3, Grattafiori et al. 2024, section 3.3.2). A rank's slice is two chunks, the
r-th from the front and the r-th from the back, so that causal attention is as much work on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import Tensor, fx

from autotp.ir.graph import Capture, Leaf, differentiable, floating, resolve, shape_of, tensors
from autotp.ir.layouts import Layout, Partition, Segment, Shard
from autotp.ir.op import Carry, Factor, Op, Rule, aten, sizes
from autotp.kernels.attention import dealt_attention
from autotp.rules.core import rule_of
from autotp.rules.local import ShardCall

from .axis import Partitions, Seed
from .batch_axis import WHOLE, BatchRules, has

SDPA = aten.scaled_dot_product_attention.default
MOVES = (
    aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.unsqueeze, aten.squeeze, aten.transpose,
    aten.permute, aten.clone, aten.contiguous, aten.alias, aten.detach,
)  # fmt: skip
VIEWS = (aten.view.default, aten.reshape.default, aten.unflatten.int, aten._unsafe_view.default)


@dataclass(frozen=True)
class Tokenwise:
    """Keeps work on tokens with their slices: what carries gradients costs more than anything else on all tokens."""

    sequence: sympy.Symbol
    grads: frozenset[fx.Node]

    def operator(self, op: Op, outs: tuple[Layout, ...], nbytes: Callable[[Tensor], float]) -> float:
        # Every rank may make all masks and positions, and turn what was gathered.
        if (self.grads and op.node not in self.grads) or getattr(op.target, "overloadpacket", None) in MOVES:
            return 0.0
        results = zip(tensors(op.node), outs, strict=False)
        whole = [v for v, x in results if x.sharded_dim is None and floating(v) and has(sizes(v), self.sequence)]
        return WHOLE * sum(map(nbytes, whole))

    def conversion(self, a: Layout, b: Layout, nbytes: float) -> float:
        return 0.0


@dataclass(frozen=True)
class SequenceRules(BatchRules):
    """The sequence axis: `batch` is its symbol.

    Attributes:
        surcharges: what the axis adds to prices.
        heads: partitions of dimensions that views split off.
        weights: values that are made of trained weights alone.
    """

    surcharges: Tokenwise | None = None
    heads: tuple[Seed, ...] = ()
    weights: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(cls, program: Capture, sequence: sympy.Symbol, ranks: int, inner: int) -> SequenceRules:
        """For a program.

        Args:
            program: of whole sequences. sequence: the symbol of their length. ranks: of the axis.
            inner: ranks of tp, which will split heads first.
        """
        grads = frozenset(differentiable(program))
        heads = tuple(_heads(program, sequence, ranks, inner))
        return cls(sequence, True, Tokenwise(sequence, grads), heads, frozenset(_weights(program)))

    @property
    def surcharge(self) -> Tokenwise | None:  # type: ignore[override]
        return self.surcharges

    def rule(self, op: Op) -> Rule | None:
        """The operator's own; causal attention splits by queries too. Weights are used whole, as they are held."""
        rule = super().rule(op)
        if rule is None:
            return None
        if op.target is SDPA and op.args["is_causal"]:
            rule = _by_queries(op, rule)
        return replace(rule, factors=tuple(f for f in rule.factors if not self._cuts_weight(op, f)))

    def _cuts_weight(self, op: Op, factor: Factor) -> bool:
        """Say whether the loop runs over a matrix of weights, and not over tokens."""
        if has([factor.size], self.batch):
            return False
        mine = [c for x, c in zip(op.slots, factor.ins, strict=True) if c is not None and resolve(x)[0] in self.weights]
        others = [c for x, c in zip(op.slots, factor.ins, strict=True) if resolve(x)[0] not in self.weights]
        return bool(mine) and (factor.contracts or None in others)

    def seeds(self, leaves: Iterable[Leaf], ranks: int) -> list[Seed]:
        return [*super().seeds(leaves, ranks), *self.heads]

    def sliced(self, leaf: Leaf) -> bool:
        return leaf.kind.passed and self.batch in shape_of(leaf.node)

    def at(self, leaf: Leaf) -> int:
        """The dimension of an input that is the sequence."""
        return shape_of(leaf.node).index(self.batch)

    def partition(self, ranks: int) -> Partition:
        """Two halves, of which a rank owns the r-th chunk of the first and, from the end, of the second."""
        half = self.batch / 2
        return Partition.of([Segment(half), Segment(half, reverse=True)], 1, ranks)

    def _output(self, x: fx.Node, whole: Layout, ranks: int, partitions: Partitions) -> Layout:
        """A slice along the first dimension that is dealt as the sequence is."""
        node, index = resolve(x)
        for d in range(len(sizes(tensors(node)[index]))):
            for p in partitions(x, d):
                if has([p.length], self.batch):
                    return Shard(d, p)  # type: ignore[arg-type]
        return whole


def _weights(program: Capture) -> Iterator[fx.Node]:
    """Values that are made of trained weights and of nothing that a call passes."""
    values = {leaf.node for leaf in program.leaves if leaf.kind.trained}
    yield from values
    for node in program.graph.nodes:
        operands = [x for x in node.all_input_nodes if tensors(x)]
        if node.op == "call_function" and operands and values.issuperset(operands):
            values.add(node)
            yield node


def _heads(program: Capture, sequence: sympy.Symbol, ranks: int, inner: int) -> Iterator[Seed]:
    """Dimensions that views split off values of tokens, heads off a hidden size: each of `inner` parts is dealt."""
    for node in program.graph.nodes:
        if node.target not in VIEWS or not has(shape_of(node), sequence):
            continue
        rule = rule_of(Op.of(node))
        for factor in rule.factors if rule is not None else ():
            before, after = factor.ins[0], factor.outs[0]
            split = before is not None and before.unit != 1 and after == Carry(after.dim if after else 0)
            n = factor.size
            if split and after is not None and isinstance(n, int) and n % (ranks * inner) == 0:
                yield node, after.dim, Partition.of([Segment(n // inner)], inner, ranks)


def _by_queries(op: Op, rule: Rule) -> Rule:
    """The rule of causal attention with a loop over queries, which read keys and values whole."""
    length, at = op.ins[0][-2], len(op.ins[0]) - 2
    if op.args["dropout_p"] > 0 or len(op.slots) > 3 or len(op.ins[0]) != 4 or length != op.ins[1][-2]:
        return rule
    queries = Factor(length, (Carry(at), None, None), (Carry(at),), label="q")
    return replace(rule, factors=(*rule.factors, queries), localise=_local_attention)


def _local_attention(op: Op, local: ShardCall) -> Any:
    """Attention of a rank's queries, each up to its own place."""
    if local.factor is None or local.factor.label != "q" or local.loop is None:
        return local.unchanged(op)
    return local.ranked(dealt_attention, *local.operands, local.runs(local.loop), op.args["scale"])
