"""Rules of a `torch.autograd.Function`: its loops are those of its forward and its backward together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import sympy
from torch import fx

from autotp import compat
from autotp.ir.graph import tensors
from autotp.ir.op import Carry, Factor, Op, Rule, aten, expression, factors_of, is_tensor, packet_of
from autotp.kernels.functions import CALL, CALLS, DRAW, Loop

from .core import rule_of

Dim = tuple[fx.Node, int]
# Operators that may read sizes: on a shard the Function gives them the shard's own.
SHAPED = (
    aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.zeros, aten.ones, aten.full, aten.empty,
    aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full, aten.sym_size,
)  # fmt: skip
ZEROS = (aten.zeros_like, aten.new_zeros, aten.sym_size)


def function_rule(op: Op) -> Rule:
    """Make the rule on which the Function's own operators agree; its loops were found when it was captured."""
    record = CALLS[op.args["key"]]
    factors = []
    for ins, outs in record.loops.get(tuple(map(len, op.ins)), ()):
        carried = [(shape[d], d) for shape, d in zip([*op.ins, *op.outs], [*ins, *outs], strict=True) if d is not None]
        if len({n for n, _ in carried}) == 1:
            factors.append(Factor(carried[0][0], tuple(map(_carry, ins)), tuple(map(_carry, outs))))
    return Rule(tuple(factors), empty=False, summed=record.linear)


def _carry(dim: int | None) -> Carry | None:
    return None if dim is None else Carry(dim)


# Not in the table: there is no call of these that would stand for all.
CALL.rule = DRAW.rule = function_rule


def linear_backward(graph: fx.Graph, operands: int) -> bool:
    """Say whether the backward in such a graph as `loops_of` reads is linear in the incoming gradients."""
    depends = set(graph.find_nodes(op="placeholder")[operands:])
    for node in graph.nodes:
        gradients = [x for x in node.all_input_nodes if x in depends]
        if node.op != "call_function" or not gradients:
            continue
        if packet_of(node.target) in ZEROS:
            continue
        op = Op.of(node)
        rule = rule_of(op)
        slots = frozenset(i for i, x in enumerate(op.slots) if x in depends)
        if tensors(node) and slots and (rule is None or slots not in rule.linear):
            return False
        depends |= {node} if tensors(node) else set()
    return True


def loops_of(graph: fx.Graph, operands: int, outs: int, guards: Sequence[sympy.Basic]) -> tuple[Loop, ...]:
    """Find the loops of a traced forward and backward.

    Args:
        graph: placeholders are the operands and the gradients of the outputs, in order; outputs are the outputs and
            the operands' gradients, None where there is none.
        operands, outs: numbers of operands and outputs. guards: conditions on its sizes.
    """
    classes = _Classes()
    for guard in guards:
        # `s0 == s1` makes two dimensions one loop; `s0 > 4` reads a size as a number, and such a loop is not split.
        if not _says_equal(guard):
            classes.read_sizes |= guard.free_symbols
    for node in graph.nodes:
        if node.op == "call_function" and tensors(node):
            classes.read(node)
    placeholders = graph.find_nodes(op="placeholder")
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    inputs, toward = placeholders[:operands], placeholders[operands : operands + outs]
    results, back = returned[:outs], returned[outs:]
    # Results are sharded as their gradients: of x + b with a gradient of b alone, whose backward is `g.sum(0)`, nothing
    # else says that the rows of both are one loop, and they would not be split.
    for result, gradient in zip(results, toward, strict=True):
        classes.equal(result, gradient)
    for operand, gradient in zip(inputs, back, strict=True):
        if gradient is not None:
            classes.equal(operand, gradient)
    # Not every class is a loop: the rows of a norm are, its columns, which it sums and divides by, are none.
    loops = [_loop(classes, members, inputs, results, back) for members in classes.classes()]
    return tuple(loop for loop in loops if loop is not None)


def _loop(classes: _Classes, members: set[Dim], inputs: list[Any], results: list[Any], back: list[Any]) -> Loop | None:
    """Return the loop of these dimensions; None where it may not be split: an operator needs it whole, no operand has
    it, or a result lacks it, which would then be a sum over the ranks."""
    at: dict[fx.Node, int] = {}
    for node, d in members:
        size = _size(node, d)
        # Two dimensions of one value in one loop are a diagonal: a rank's share of it is no slice.
        if node in at or not isinstance(size, sympy.Expr) or size.free_symbols & classes.read_sizes:
            return None
        at[node] = d
    if members & classes.whole or at.keys().isdisjoint(inputs) or not at.keys() >= set(results):
        return None
    partial = _partial(classes, at)
    if partial is None:
        return None
    for x, gradient in zip(inputs, back, strict=True):
        if gradient is not None and (x in at) == (gradient in partial):  # a shard's gradient is a shard, else a summand
            return None
    # A sum that is neither a gradient nor summed on, as a norm over the batch that the backward divides by.
    if partial - set(back) - classes.onward:
        return None
    return tuple(map(at.get, inputs)), tuple(map(at.get, results))


def _size(node: fx.Node, d: int) -> Any:
    return expression(tensors(node)[0].shape[d])


def _partial(classes: _Classes, at: dict[fx.Node, int]) -> set[fx.Node] | None:
    """Return the values that are partial where these dimensions are split; None where they cannot be split."""
    partial: set[fx.Node] = set()
    classes.onward = set()
    for node, (op, rule) in classes.ops.items():
        sums = {i for i, x in enumerate(op.slots) if x in partial}
        carried = {i for i, x in enumerate(op.slots) if x in at}
        if sums:
            # A summand passes only where the operator is linear in all of them together: the square of a sum is not
            # the sum of squares, and a summand times a slice is neither.
            linear = list(map(set, rule.linear)) if rule is not None else []
            if carried or node in at or sums not in linear:
                return None
            classes.onward |= {op.slots[i] for i in sums}
            partial.add(node)
        elif carried or node in at:
            splits = [f for f in factors_of(rule) if _splits(f, op, node, at)]
            # The loop ends here: only a sum over it gives summands, a maximum or a mean by its own count does not.
            sums_up = any(f.contracted and f.reduction == "sum" for f in splits)
            if node not in at and sums_up:
                partial.add(node)
            elif node not in at or not splits:
                return None
    return partial


def _says_equal(guard: sympy.Basic) -> bool:
    """Say whether a guard equates two sizes, which reads neither as a number."""
    return isinstance(guard, sympy.Eq) and all(isinstance(x, sympy.Symbol) for x in guard.args)


def _splits(factor: Factor, op: Op, node: fx.Node, at: dict[fx.Node, int]) -> bool:
    """Say whether splitting this factor splits just these dimensions."""
    dims = [*(at.get(x) for x in op.slots), at.get(node)]
    carries = factor.carries
    plain = all(c is None or _plain(c) for c in carries)
    return plain and [c and c.dim for c in carries] == dims


def _plain(carry: Carry) -> bool:
    """Say whether the dimension is the loop, and nothing else."""
    return carry == Carry(carry.dim)


@dataclass
class _Classes:
    """Equivalence classes of the dimensions of a graph's values: those of one class are one loop.

    Attributes:
        parent: the forest of a union-find over dimensions.
        whole: dimensions that must stay whole. read_sizes: symbols of sizes that are read as numbers.
        ops: every operator with its rule. onward: partial values that are summed up further.
    """

    parent: dict[Dim, Dim] = field(default_factory=dict)
    whole: set[Dim] = field(default_factory=set)
    read_sizes: set[Any] = field(default_factory=set)
    ops: dict[fx.Node, tuple[Op, Rule | None]] = field(default_factory=dict)
    onward: set[fx.Node] = field(default_factory=set)

    def root(self, dim: Dim) -> Dim:
        while self.parent.setdefault(dim, dim) != dim:
            dim = self.parent[dim]
        return dim

    def equal(self, a: Any, b: Any) -> None:
        for d in range(tensors(a)[0].ndim):
            self.parent[self.root((a, d))] = self.root((b, d))

    def read(self, node: fx.Node) -> None:
        """Take an operator's loops into the classes, and note dimensions and sizes that forbid a split."""
        op = Op.of(node)
        # A Function within a Function is read by itself, and says nothing of its loops here.
        rule = rule_of(op) if len(op.outs) == 1 and node.target is not CALL else None
        self.ops[node] = op, rule
        operands = [(x, d) for x in op.slots for d in range(len(tensors(x)[0].shape))]
        carried: set[Dim] = set()
        for f in factors_of(rule):
            slots = zip([*op.slots, node], f.carries, strict=True)
            places = [(x, c) for x, c in slots if c is not None]
            dims = [(x, c.dim) for x, c in places]
            # In units or pieces, as heads in a hidden size, a dimension is not the loop itself.
            if all(_plain(c) for _, c in places):
                carried |= set(dims)
            for a, b in pairwise(dims):
                self.parent[self.root(a)] = self.root(b)
        self.whole |= {*operands, *_dims(node)} - carried
        # Operators that take a shape are given sizes as shapes; any other one reads them as numbers: x / x.shape[0].
        if packet_of(node.target) not in SHAPED:
            numbers = [x.meta["val"] for x in node.all_input_nodes if not is_tensor(x) and "val" in x.meta]
            for n in compat.tree_leaves(numbers):
                size = expression(n) if hasattr(n, "node") else None
                if isinstance(size, sympy.Expr):
                    self.read_sizes |= size.free_symbols

    def classes(self) -> list[set[Dim]]:
        groups: dict[Dim, set[Dim]] = defaultdict(set)
        for dim in list(self.parent):
            groups[self.root(dim)].add(dim)
        return list(groups.values())


def _dims(node: fx.Node) -> Sequence[Dim]:
    return [(node, d) for v in tensors(node)[:1] for d in range(len(v.shape))]
