"""The origin of values of a captured graph: parameters behind views, contractions, and branches that meet.

Everything here is read off the operator rules: a loop that no result carries is contracted, a dimension that no factor
carries is worked along as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, permutations

from torch import fx

from autotp.ir.graph import Capture, differentiable
from autotp.ir.layouts import Size, simplify
from autotp.ir.op import Op, Rule, Shape, is_tensor
from autotp.rules.core import rule_of

from .adapters import Adapter, added, looked_up, scaled, turned

Root = tuple[fx.Node, tuple]  # an operator that is not pointwise, and which pieces of its result


@dataclass
class Dataflow:
    """Derived facts of a program.

    Attributes:
        ops, rules: of every call that makes tensors.
        weights: value -> the parameter that it is, seen through views and casts; `own`: all tensors of the module.
        roots: value with a gradient -> what it is made of, by pointwise operators and views only.
        junctions: sums of two independent branches, such as a residual's.
        products: products of independent branches, with the roots of each.
        adapted: sum or product -> the adapter that it joins to a frozen product, whose roots it has; one before such a
            product has those of what comes in.
        apart: operators of adapters, which no walk enters.
    """

    program: Capture
    operators: Mapping[fx.Node, tuple[Op, Rule | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grads = differentiable(self.program)
        self.order = {n: i for i, n in enumerate(self.program.graph.nodes)}
        self.ops: dict[fx.Node, Op] = {}
        self.weights = {leaf.node: leaf.node for leaf in self.program.leaves if leaf.kind.weight}
        self.own = {leaf.node for leaf in self.program.leaves if leaf.kind.steady}
        self.names = {leaf.node: leaf.name for leaf in self.program.leaves}
        self.roots: dict[fx.Node, frozenset[Root]] = {}
        self.junctions: set[fx.Node] = set()
        self.products: list[tuple[fx.Node, list[frozenset[Root]]]] = []
        self.rules: dict[fx.Node, Rule | None] = {}
        self.products_of_two: dict[fx.Node, bool] = {}
        self.adapted: dict[fx.Node, Adapter] = {}
        self.apart: set[fx.Node] = set()
        for n in self.program.graph.nodes:
            if n.op != "call_function":
                continue
            if n.target is operator.getitem:
                self._item(n)
                continue
            self.ops[n], self.rules[n] = self.operators[n] if n in self.operators else _read(n)
            self._call(n)

    def _item(self, node: fx.Node) -> None:
        source = node.args[0]
        if isinstance(source, fx.Node) and source in self.weights:
            self.weights[node] = self.weights[source]
        elif isinstance(source, fx.Node) and source in self.roots:
            self.roots[node] = frozenset((r, (*piece, node.args[1])) for r, piece in self.roots[source])

    def _call(self, node: fx.Node) -> None:
        op = self.ops[node]
        if len(op.slots) == 1 and op.slots[0] in self.weights and self.passes(node):
            self.weights[node] = self.weights[op.slots[0]]
        elif node in self.grads:
            self.roots[node] = self._roots(node)
            if (adapter := turned(self, node)) is not None:
                self._pass_through(adapter)

    def _pass_through(self, adapter: Adapter) -> None:
        """From now on what an adapter before a product makes of a value is that value, as a view of it would be."""
        turn = adapter.nodes[-1]
        self.adapted[turn] = adapter
        self.apart.update(adapter.nodes[:-1])
        self.products_of_two[turn] = False
        (value,) = (s for s in self.ops[turn].slots if s not in self.apart)
        node = self.inputs(adapter.base)[0]
        while node is not value:
            self.roots[node] = self.roots.get(value, frozenset())
            node = self.ops[node].slots[0] if node is not turn else value

    def _roots(self, node: fx.Node) -> frozenset[Root]:
        """The roots of a value; notes sums and products of independent branches on the way."""
        op, own = self.ops[node], frozenset([(node, ())])
        branches = [self.roots[s] for s in self.inputs(node)]
        # A softmax or a product mixes elements: what comes out is new, and the walk ends there.
        if not branches or not self.passes(node):
            return own
        merged = frozenset().union(*branches)
        # w x + B A x of LoRA is w x with other weights: as a sum of two branches it would be a residual.
        if self._adapts(node, names(merged)):
            return frozenset((root, piece) for root, piece in merged if root is self.adapted[node].base)
        if len(branches) == 1:
            # q, k and v that are cut out of one product share their root: the piece tells them apart.
            if self._linear(node) and _fewer(op):
                return frozenset((root, (*piece, node.name)) for root, piece in merged)
            return merged
        if self.together(node):
            # x - mean(x) is x, not a residual: a norm's statistic is made of what it is taken from.
            for one, other in permutations(branches, 2):
                if any(self.statistic(root, other) for root in names(one)):
                    return other
            # Branches that share a root are one computation, as the two halves of a rotary embedding are.
            if any(names(a) & names(b) for a, b in combinations(branches, 2)):
                return merged
            self.junctions.add(node)
            return own
        # A gate times a value: of two different pieces, even where one product made both.
        if all(not a & b for a, b in combinations(branches, 2)):
            self.products.append((node, branches))
        return merged

    def _adapts(self, node: fx.Node, made_of: set[fx.Node]) -> bool:
        """Whether an adapter's result comes in here; notes it."""
        forms = (added(self, node, made_of), looked_up(self, node)) if self.together(node) else (scaled(self, node),)
        adapter = next((form for form in forms if form is not None), None)
        if adapter is None:
            return False
        self.adapted[node] = adapter
        self.apart.update(n for n in adapter.nodes if n is not node)
        return True

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Operands that carry a gradient and are not parameters."""
        return [s for s in self.ops[node].slots if s in self.roots]

    def parameters(self, node: fx.Node) -> list[fx.Node]:
        """Parameters that the operator reads, behind views and casts."""
        slots = self.ops[node].slots if node in self.ops else []
        return [self.weights[s] for s in slots if s in self.weights]

    def passes(self, node: fx.Node) -> bool:
        """Whether the operator is pointwise or a view: it mixes no elements of a dimension."""
        op, rule = self.ops[node], self.rules[node]
        if rule is None or not rule.factors:
            return len(op.slots) == 1 and op.ins == op.outs
        if any(f.contracts for f in rule.factors):
            return False
        return self._linear(node) or all(self._covered(node, slot) for slot in range(len(op.slots)))

    def _linear(self, node: fx.Node) -> bool:
        rule = self.rules[node]
        return rule is not None and len(self.ops[node].slots) == 1 and frozenset({0}) in rule.linear

    def together(self, node: fx.Node) -> bool:
        """Whether the operator is linear in several operands at once: a sum, a concatenation."""
        rule = self.rules[node]
        return rule is not None and any(len(s) > 1 for s in rule.linear)

    def _covered(self, node: fx.Node, slot: int) -> bool:
        op, rule = self.ops[node], self.rules[node]
        assert rule is not None
        carried = {f.ins[slot].dim for f in rule.factors if f.ins[slot] is not None}  # type: ignore[union-attr]
        return all(n == 1 or d in carried for d, n in enumerate(op.ins[slot]))

    def contraction(self, node: fx.Node) -> bool:
        """Whether the operator sums products of two operands: a matrix product in any spelling."""
        if node not in self.products_of_two:
            factors = rule.factors if (rule := self.rules.get(node)) is not None else ()
            sums_products = any(f.contracts and len(f.ins) - f.ins.count(None) > 1 for f in factors)
            self.products_of_two[node] = sums_products
        return self.products_of_two[node]

    def width(self, node: fx.Node) -> Size:
        """Number of products that a contraction sums for an element of its result."""
        rule, total = self.rules[node], 1
        for f in rule.factors if rule is not None else ():
            total = total if not f.contracts else simplify(total * f.size)
        return total

    def batched(self, node: fx.Node) -> fx.Node | None:
        """The parameter of a product that has one matrix for each of several experts; None for other operators."""
        op = self.ops[node]
        if node not in self.grads:
            return None
        for slot, operand in enumerate(op.slots):
            # One matrix an expert: a weight of two dimensions is everybody's.
            if operand in self.weights and len(op.ins[slot]) >= 3 and self._by_expert(node, slot):
                return self.weights[operand]
        return None

    def _by_expert(self, node: fx.Node, slot: int) -> bool:
        """Whether the weight in this slot shares a loop with the activations that every result keeps."""
        op, rule = self.ops[node], self.rules[node]
        active = [op.slots.index(x) for x in self.inputs(node)]
        if rule is None:
            # A kernel without a rule says nothing of its loops: tokens in rows beside a stack of matrices.
            return len(op.ins[slot]) == 3 and any(len(op.ins[i]) == 2 for i in active)
        if not self.contraction(node):
            return False
        # The rows of a convolution's filter [out, in, k] are no experts: no activation carries `out`.
        by_slot = [f for f in rule.factors if f.ins[slot] and all(f.outs)]
        return any(f.ins[i] for f in by_slot for i in active)

    def weighted(self, node: fx.Node) -> bool:
        """Whether the node is a contraction with a parameter (or with the experts' parameters)."""
        if node not in self.roots or node not in self.ops:
            return False
        return bool((self.contraction(node) and self.parameters(node)) or self.batched(node))

    def statistic(self, node: fx.Node, source: Iterable[Root]) -> bool:
        """Whether the operator reduces something that is made of `source`: its mean, its variance."""
        op = self.ops.get(node)
        if op is None or len(op.slots) != 1 or op.slots[0] not in self.roots or op.outs[0] == op.ins[0]:
            return False
        return not self.passes(node) and bool(names(self.roots[op.slots[0]]) & names(source))

    def walk(
        self, starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], *stops: Callable[[fx.Node], bool]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """(nodes passed, nodes stopped at by the first of `stops`); the other stops end the walk silently.

        Args:
            starts: where to begin.
            step: the next nodes of one.
            stops: whether the walk ends at a node; those that the first one stops at are returned.
        """
        between: dict[fx.Node, None] = {}
        ends: dict[fx.Node, None] = {}
        work = list(starts)
        while work:
            n = work.pop()
            if n in between or n in ends or n not in self.roots or n in self.apart:
                continue
            if stops[0](n):
                ends[n] = None
            elif not any(stop(n) for stop in stops[1:]):
                between[n] = None
                work += step(n)
        return sorted(between, key=self.order.__getitem__), sorted(ends, key=self.order.__getitem__)

    def back(self, starts: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes behind `starts` up to the nearest contractions, and these; a junction ends the walk."""
        return self.walk(starts, operands, self._product, self.junctions.__contains__)

    def ahead(self, starts: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes ahead of `starts` up to the next contractions, and these; a junction ends the walk."""
        return self.walk(starts, lambda n: n.users, self._product, self.junctions.__contains__)

    def _product(self, node: fx.Node) -> bool:
        return self.contraction(node) or (node in self.ops and self.weighted(node))


def names(roots: Iterable[Root]) -> set[fx.Node]:
    """The operators of roots, without their pieces."""
    return {r for r, _ in roots}


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of a node; of a `getitem`, the operator before it."""
    return [n for n in node.all_input_nodes if is_tensor(n) or node.target is operator.getitem]


def _read(node: fx.Node) -> tuple[Op, Rule | None]:
    op = Op.of(node)
    return op, rule_of(op)


def _fewer(op: Op) -> bool:
    """Whether a view with one result cuts a part out of its operand."""
    if len(op.outs) != 1 or simplify(_count(op.outs[0]) - _count(op.ins[0])) == 0:
        return False
    pairs = zip(op.outs[0], op.ins[0], strict=False)
    cut = any(isinstance(m, int) and isinstance(n, int) and m < n for m, n in pairs)
    return cut or len(op.outs[0]) < len(op.ins[0])


def _count(shape: Shape) -> Size:
    total: Size = 1
    for n in shape:
        total = total * n
    return total
