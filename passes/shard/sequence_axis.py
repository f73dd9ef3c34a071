"""The sequence axis of a mesh, for planner and rewriter: its rules, and attention with sharded queries.

Weights are replicated over it and the sequence is sharded, so the solver's choice is at operators that mix tokens:
convert what they read to slices of another dimension (of heads: Ulysses, Jacobs et al. 2023) and back, or gather what
all queries read (keys and values: Llama 3, Grattafiori et al. 2024, section 3.3.2). A rank's slice is two chunks, the
r-th from the front and the r-th from the back, so that causal attention is as much work on each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import sympy
from torch import Tensor, fx

from autotp.errors import CaptureError
from autotp.ir.graph import Capture, Leaf, differentiable, draws, floating, resolve, shape_of, tensor_at, tensors, where
from autotp.ir.layouts import Layout, Layouts, Partition, Segment, Shard, SlotLayouts
from autotp.ir.marks import Axis
from autotp.ir.op import Carry, Factor, Op, Rule, aten, factors_of, packet_of
from autotp.ir.program import Planned
from autotp.kernels.attention import dealt_attention
from autotp.passes.optimise.masks import causal
from autotp.rules.core import rule_of
from autotp.rules.local import ShardCall
from autotp.text import listed

from .axis import Partitions, Seed
from .batch_axis import Apart, BatchRules, has, one_symbol

SDPA = aten.scaled_dot_product_attention.default
MOVES = (
    aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.unsqueeze, aten.squeeze, aten.transpose,
    aten.permute, aten.clone, aten.contiguous, aten.alias, aten.detach,
)  # fmt: skip
VIEWS = (aten.view.default, aten.reshape.default, aten.unflatten.int, aten._unsafe_view.default)


@dataclass(frozen=True)
class Tokenwise(Apart):
    """Surcharge that keeps work on tokens with their slices: of values that carry gradients all tokens cost more than
    anything else."""

    grads: frozenset[fx.Node]

    def operator(self, op: Op, outs: SlotLayouts, nbytes: Callable[[Tensor], float]) -> float:
        # Every rank may make all masks and positions, and turn what was gathered.
        if (self.grads and op.node not in self.grads) or packet_of(op.target) in MOVES:
            return 0.0
        return super().operator(op, outs, nbytes)

    def counts(self, value: Tensor) -> bool:
        return floating(value)

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

    axis: ClassVar[Axis] = "cp"
    by_examples: ClassVar[bool] = False
    surcharges: Tokenwise | None = None
    heads: tuple[Seed, ...] = ()
    weights: frozenset[fx.Node] = frozenset()

    @classmethod
    def symbol(cls, program: Capture) -> sympy.Symbol:
        """Find the symbol of the sequence: the first input's second dimension. Equal sizes become one symbol."""
        if any(leaf.kind.carried for leaf in program.leaves):
            raise CaptureError(
                "with cp sequences are sharded, and what this call carries to the next, such as a cache, is not. Call "
                "it with use_cache=False, or decode by generate(), or with a cache that you pass: each rank of cp then "
                "computes all of it."
            )
        if program.conditions is not None:
            raise CaptureError(
                "this forward decides by the values of its inputs, which differ between parts of a sequence: the cp "
                "ranks would run different programs. Use cp=1, or rewrite the branch with torch.where."
            )
        seconds = [leaf for leaf in program.inputs if len(shape_of(leaf.node)) > 1]
        sequence = shape_of(seconds[0].node)[1] if seconds else None
        if not isinstance(sequence, sympy.Symbol):
            raise CaptureError(
                "with cp the second dimension of the first input is the sequence, of any length, and this model was "
                f"captured for one length of it ({sequence}; the plan's notes say why). Use cp=1."
            )
        sequence = one_symbol(program, seconds, 1)
        if program.hints[sequence] % 2:
            raise CaptureError(
                f"with cp a rank's part of a sequence is two chunks of one length, and the example's has "
                f"{program.hints[sequence]} tokens. Pad sequences to a multiple of 2 x cp."
            )
        # A rank's part of such an input would be neither rows nor columns of it.
        for leaf in program.inputs:
            if sum(size == sequence for size in shape_of(leaf.node)) > 1:
                raise CaptureError(
                    f"with cp the input {leaf.name!r} has the sequence in two dimensions, as a mask of pairs has, and "
                    "a rank's part of it is not known. Leave it out: a model makes its mask from what is padding."
                )
        return sequence

    @classmethod
    def of(cls, program: Capture, symbol: sympy.Symbol, ranks: int, inner: int) -> SequenceRules:
        _causal_by_index(program)
        grads = frozenset(differentiable(program))
        heads = tuple(_heads(program, symbol, ranks, inner))
        return cls(symbol, Tokenwise(symbol, grads), heads, frozenset(_weights(program)))

    def settle(self, program: Capture, planned: Planned, inputs: Layouts) -> list[str]:
        """Refuse random numbers for values that are not sharded, and say in words what changes hands.

        Args:
            program, planned, inputs: see `BatchRules.settle`.
        """
        for node, op in planned.ops.items():
            if draws(node) and all(x.sharded_dim is None for x in planned.decisions[node].outs):
                raise CaptureError(
                    f"{where(op.node)} draws random numbers for a value that every cp rank has whole, and each would "
                    "draw others. Use cp=1, or a model without dropout there."
                )
        even: sympy.Basic = sympy.Eq(sympy.Mod(self.batch, 2), 0)
        program.guards.append(even)
        return [f"over cp each rank has two chunks of the sequence of {listed(inputs)}", *self._notes(program)]

    def _notes(self, program: Capture) -> list[str]:
        """List the values that change hands, for the plan's notes."""
        moves = [(n, b.source.sharded_dim, b.target.sharded_dim) for n, b in self.conversions(program)]
        gathered = [n.all_input_nodes[0] for n, a, b in moves if a is not None and b is None]
        turned = [n.all_input_nodes[0] for n, a, b in moves if a is not None and b is not None]
        lists = [("gathered", gathered), ("sent from tokens to another dimension or back, by all-to-all,", turned)]
        # With its module, the same for all repeated blocks.
        notes = []
        for what, nodes in lists:
            names = [re.sub(r"\.\d+(?=\.|$)", ".*", where(node)) for node in nodes]
            notes += [f"over cp {what} after: {listed(names)}"] if names else []
        return notes

    @property
    def surcharge(self) -> Apart:
        return self.surcharges or super().surcharge

    def rule(self, op: Op) -> Rule | None:
        """Read the rule; causal attention splits by queries too. Weights are used whole, as they are held."""
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
        """Give the dimension of an input that is the sequence."""
        return shape_of(leaf.node).index(self.batch)

    def partition(self, ranks: int) -> Partition:
        """Make two halves, of which a rank owns the r-th chunk of the first and, from the end, of the second."""
        half = self.batch / 2
        return Partition.of([Segment(half), Segment(half, deal=True)], 1, ranks)

    def _output(self, x: fx.Node, whole: Layout, ranks: int, partitions: Partitions) -> Layout:
        """Shard the first dimension that may be sharded as the sequence is."""
        for d in range(tensor_at(resolve(x)).ndim):
            for p in partitions(x, d):
                if has([p.length], self.batch):
                    return Shard(d, p)  # type: ignore[arg-type]
        return whole


def _weights(program: Capture) -> Iterator[fx.Node]:
    """Yield the values that are made of trained weights and of nothing that a call passes."""
    values = {leaf.node for leaf in program.leaves if leaf.kind.trained}
    yield from values
    for node in program.graph.nodes:
        operands = [x for x in node.all_input_nodes if tensors(x)]
        if node.op == "call_function" and operands and values.issuperset(operands):
            values.add(node)
            yield node


def _heads(program: Capture, sequence: sympy.Symbol, ranks: int, inner: int) -> Iterator[Seed]:
    """Yield dimensions that views split off values of tokens, heads off a hidden size, in `inner` sharded parts."""
    for node in program.graph.nodes:
        if node.target not in VIEWS or not has(shape_of(node), sequence):
            continue
        for factor in factors_of(rule_of(Op.of(node))):
            before, after = factor.ins[0], factor.outs[0]
            split = before is not None and before.unit != 1 and after == Carry(after.dim if after else 0)
            n = factor.size
            if split and after is not None and isinstance(n, int) and n % (ranks * inner) == 0:
                yield node, after.dim, Partition.of([Segment(n // inner)], inner, ranks)


def _by_queries(op: Op, rule: Rule) -> Rule:
    """Extend the rule of causal attention by a loop over queries, which read keys and values whole."""
    length, at = op.ins[0][-2], len(op.ins[0]) - 2
    if op.args["dropout_p"] > 0 or len(op.slots) > 3 or len(op.ins[0]) != 4 or length != op.ins[1][-2]:
        return rule
    queries = Factor(length, (Carry(at), None, None), (Carry(at),), label="q")
    return replace(rule, factors=(*rule.factors, queries), localise=_local_attention)


def _local_attention(op: Op, local: ShardCall) -> Any:
    """Write attention of a rank's queries, each up to its own place."""
    if local.factor is None or local.factor.label != "q" or local.loop is None:
        return local.unchanged(op)
    return local.ranked(dealt_attention, *local.operands, local.runs(local.loop), op.args["scale"])


def _causal_by_index(program: Capture) -> None:
    """Mark attention as causal where its mask says no more: then no rank makes a mask of its queries."""
    is_causal = cache(lambda mask: mask.op != "placeholder" and causal(mask))
    for node in [n for n in program.graph.nodes if n.target is SDPA]:
        args = Op.of(node).args
        mask = args["attn_mask"]
        if mask is None or shape_of(args["query"])[-2] != shape_of(args["key"])[-2]:
            continue
        if is_causal(mask):
            node.args = args["query"], args["key"], args["value"], None, args["dropout_p"], True
            node.kwargs = {k: args[k] for k in ("scale", "enable_gqa") if k in args}
    program.graph.eliminate_dead_code()
