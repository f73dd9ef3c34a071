"""The origin of values of a captured graph: parameters behind views, contractions, and branches that meet.

Everything here is read off the operator rules: a loop that no result carries is contracted, a dimension that no factor
carries is worked along as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, permutations

from torch import fx

from autotp.cost.prices import LOOKUPS
from autotp.ir.graph import Capture, differentiable, reached
from autotp.ir.layouts import Size, simplify
from autotp.ir.op import Op, Rule, factors_of, is_tensor, packet_of
from autotp.rules.core import product, rule_of

Walked = tuple[list[fx.Node], list[fx.Node]]  # nodes that a walk passed, and those that it stopped at

Root = tuple[fx.Node, tuple]  # an operator that is not pointwise, and which pieces of its result


@dataclass
class Dataflow:
    """Facts of a program that follow from the rules of its operators.

    Attributes:
        ops, rules: of every call that makes tensors.
        weights: value -> the parameter that it is, seen through views and casts; `steady`: all tensors of the module.
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
        self.ops: dict[fx.Node, Op] = {}
        self.weights = {leaf.node: leaf.node for leaf in self.program.leaves if leaf.kind.weight}
        self.steady = {leaf.node for leaf in self.program.leaves if leaf.kind.steady}
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
            if n in self.operators:
                self.ops[n], self.rules[n] = self.operators[n]
            else:
                self.ops[n] = op = Op.of(n)
                self.rules[n] = rule_of(op)
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
        """Take what an adapter before a product makes of a value for that value, as a view of it would be."""
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
        """Find the roots of a value; notes sums and products of independent branches on the way."""
        op, itself = self.ops[node], frozenset([(node, ())])
        branches = [self.roots[s] for s in self.inputs(node)]
        # A softmax or a product mixes elements: what comes out is new, and the walk ends there.
        if not branches or not self.passes(node):
            return itself
        merged = frozenset().union(*branches)
        # w x + B A x of LoRA is w x with other weights: as a sum of two branches it would be a residual.
        if self._adapts(node, names(merged)):
            return frozenset((root, piece) for root, piece in merged if root is self.adapted[node].base)
        if len(branches) == 1:
            # q, k and v that are cut out of one product share their root: the piece distinguishes them.
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
            return itself
        # A gate times a value: of two different pieces, even where one product made both.
        if all(not a & b for a, b in combinations(branches, 2)):
            self.products.append((node, branches))
        return merged

    def _adapts(self, node: fx.Node, made_of: set[fx.Node]) -> bool:
        """Say whether an adapter's result comes in here; notes it."""
        forms = (added(self, node, made_of), looked_up(self, node)) if self.together(node) else (scaled(self, node),)
        adapter = next((form for form in forms if form is not None), None)
        if adapter is None:
            return False
        self.adapted[node] = adapter
        self.apart.update(n for n in adapter.nodes if n is not node)
        return True

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """List the operands that carry a gradient and are not parameters."""
        return [s for s in self.ops[node].slots if s in self.roots]

    def parameters(self, node: fx.Node) -> list[fx.Node]:
        """List the parameters that the operator reads, behind views and casts."""
        slots = self.ops[node].slots if node in self.ops else []
        return [self.weights[s] for s in slots if s in self.weights]

    def passes(self, node: fx.Node) -> bool:
        """Say whether the operator is pointwise or a view: it mixes no elements of a dimension."""
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
        """Say whether the operator is linear in several operands at once: a sum, a concatenation."""
        rule = self.rules[node]
        return rule is not None and any(len(s) > 1 for s in rule.linear)

    def _covered(self, node: fx.Node, slot: int) -> bool:
        op, rule = self.ops[node], self.rules[node]
        assert rule is not None
        carried = {f.ins[slot].dim for f in rule.factors if f.ins[slot] is not None}  # type: ignore[union-attr]
        return all(n == 1 or d in carried for d, n in enumerate(op.ins[slot]))

    def contraction(self, node: fx.Node) -> bool:
        """Say whether the operator sums products of two operands: a matrix product in any spelling."""
        if node not in self.products_of_two:
            factors = factors_of(self.rules.get(node))
            self.products_of_two[node] = any(f.contracts and len(f.ins) - f.ins.count(None) > 1 for f in factors)
        return self.products_of_two[node]

    def width(self, node: fx.Node) -> Size:
        """Count the products that a contraction sums for an element of its result."""
        return product(f.size for f in factors_of(self.rules[node]) if f.contracts)

    def batched(self, node: fx.Node) -> fx.Node | None:
        """Give the parameter of a product that has one matrix for each of several experts; None for other operators."""
        op = self.ops[node]
        if node not in self.grads:
            return None
        for slot, operand in enumerate(op.slots):
            # One matrix an expert: a weight of two dimensions is everybody's.
            if operand in self.weights and len(op.ins[slot]) >= 3 and self._by_expert(node, slot):
                return self.weights[operand]
        return None

    def _by_expert(self, node: fx.Node, slot: int) -> bool:
        """Say whether the weight in this slot shares a loop with the activations that every result keeps."""
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
        """Say whether the node is a contraction with a parameter (or with the experts' parameters)."""
        if node not in self.roots or node not in self.ops:
            return False
        return bool((self.contraction(node) and self.parameters(node)) or self.batched(node))

    def statistic(self, node: fx.Node, source: Iterable[Root]) -> bool:
        """Say whether the operator reduces something that is made of `source`: its mean, its variance."""
        op = self.ops.get(node)
        if op is None or len(op.slots) != 1 or op.slots[0] not in self.roots or op.outs[0] == op.ins[0]:
            return False
        return not self.passes(node) and bool(names(self.roots[op.slots[0]]) & names(source))

    def walk(
        self, starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], *stops: Callable[[fx.Node], bool]
    ) -> Walked:
        """Walk from node to node; gives those passed, and those that the first of `stops` ended at.

        Args:
            starts: where to begin.
            step: the next nodes of one.
            stops: whether the walk ends at a node; where another than the first one does, the node is in neither list.
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
        return sorted(between), sorted(ends)

    def back(self, starts: Iterable[fx.Node]) -> Walked:
        """Walk back from `starts` up to the nearest contractions, which are returned too; a junction ends the walk."""
        return self.walk(starts, operands, self._product, self.junctions.__contains__)

    def ahead(self, starts: Iterable[fx.Node]) -> Walked:
        """Walk ahead of `starts` up to the next contractions, which are returned too; a junction ends the walk."""
        return self.walk(starts, lambda n: n.users, self._product, self.junctions.__contains__)

    def _product(self, node: fx.Node) -> bool:
        return self.contraction(node) or (node in self.ops and self.weighted(node))


def names(roots: Iterable[Root]) -> set[fx.Node]:
    """Give the operators of roots, without their pieces."""
    return {r for r, _ in roots}


def operands(node: fx.Node) -> list[fx.Node]:
    """List the tensor operands of a node; of a `getitem`, the operator before it."""
    return [n for n in node.all_input_nodes if is_tensor(n) or node.target is operator.getitem]


def _fewer(op: Op) -> bool:
    """Say whether a view with one result cuts a part out of its operand."""
    if len(op.outs) != 1 or simplify(product(op.outs[0]) - product(op.ins[0])) == 0:
        return False
    pairs = zip(op.outs[0], op.ins[0], strict=False)
    cut = any(isinstance(m, int) and isinstance(n, int) and m < n for m, n in pairs)
    return cut or len(op.outs[0]) < len(op.ins[0])


# ---- adapters --------------------------------------------------------------------------------------------------------

# Adapters in a captured graph: trained operators beside a frozen product of activations and a weight, or before it.
#
# A low-rank pair is one form of it: `W x + B A x`, W frozen; a rotation another: `W (R x)`, R made of trained
# weights. What is read is which weights train, and that both sides of a sum are made of the same value; no name, and
# no library.


@dataclass(frozen=True)
class Adapter:
    """Operators that are trained beside a frozen product, or before it.

    Attributes:
        base: the frozen product, or the frozen lookup.
        nodes: the adapter's operators, in the order of the graph; none that the product's own result passes through,
            but for one that scales it.
        where: "beside" where its result is added to that of `base`, "scales" where it multiplies that, and "before"
            where it multiplies what `base` reads.
        rank: the least width of its products, where it has several.
    """

    base: fx.Node
    nodes: tuple[fx.Node, ...]
    where: str
    rank: Size | None = None


def added(flow: Dataflow, node: fx.Node, made_of: Iterable[fx.Node]) -> Adapter | None:
    """Find the adapter whose result a sum adds to that of a frozen product; None where it adds something else.

    Args:
        flow: of the operators before the sum.
        node: the sum; `made_of`: the roots of its operands.
    """
    op = flow.ops[node]
    bases = [n for n in made_of if frozen(flow, n)]
    if len(bases) != 1 or any(shape != op.outs[0] for shape in op.ins):
        return None
    base = bases[0]
    region = _between(flow, node, base, _source(flow, base))
    # What reads the base product itself is behind the sum, not beside it.
    nodes = [n for n in region or () if base not in names(flow.roots.get(n, ()))]
    widths = _widths(flow, nodes)
    rank = min(widths, key=int) if len(widths) > 1 else None
    return Adapter(base, tuple(nodes), "beside", rank) if widths else None


def looked_up(flow: Dataflow, node: fx.Node) -> Adapter | None:
    """Find the adapter whose result a sum adds to rows of a frozen table, both by the same indices; or None."""
    op = flow.ops[node]
    tables = [s for s in op.slots if frozen_table(flow, s)]
    others = [s for s in op.slots if s not in tables]
    if len(tables) != 1 or len(others) != 1 or any(shape != op.outs[0] for shape in op.ins):
        return None
    indices = {s for s in flow.ops[tables[0]].slots if s not in flow.weights}
    nodes = _of_weights(flow, others[0], indices)
    if nodes is None or tables[0] in nodes or not any(indices & {*n.all_input_nodes} for n in nodes):
        return None  # what is made of the rows themselves is a layer behind the table
    return Adapter(tables[0], tuple(nodes), "beside", min(_widths(flow, nodes), key=int, default=None))


def turned(flow: Dataflow, base: fx.Node) -> Adapter | None:
    """Find the adapter that multiplies what a frozen product reads, with only views between them; or None.

    The last of its operators is that product; it is of what the weights alone make, and of what comes in.
    """
    inputs = flow.inputs(base) if frozen(flow, base) else []
    if len(inputs) != 1:
        return None
    node = inputs[0]
    while node in flow.ops and flow.passes(node) and len(flow.ops[node].slots) == 1:
        node = flow.ops[node].slots[0]
    if node not in flow.ops or not flow.contraction(node) or len(flow.ops[node].slots) != 2:
        return None
    sides = [_of_weights(flow, s, set()) for s in flow.ops[node].slots]
    matrix = [nodes for nodes in sides if nodes]  # a weight by itself would be a layer's
    return Adapter(base, (*matrix[0], node), "before") if len(matrix) == 1 else None


def scaled(flow: Dataflow, node: fx.Node) -> Adapter | None:
    """Find the adapter that is a trained factor of the result of a frozen product; or None."""
    op = flow.ops[node]
    sides, vectors = flow.inputs(node), flow.parameters(node)
    if len(op.slots) != 2 or len(sides) != 1 or len(vectors) != 1 or not _trained(vectors[0]):
        return None
    made_of = names(flow.roots[sides[0]])
    base = next(iter(made_of))
    return Adapter(base, (node,), "scales") if len(made_of) == 1 and frozen(flow, base) else None


def frozen(flow: Dataflow, node: fx.Node) -> bool:
    """Say whether an operator multiplies activations by a matrix that is not trained."""
    matrices = [p for p in flow.parameters(node) if p.meta["val"].ndim > 1]
    return bool(matrices) and not any(map(_trained, matrices)) and flow.weighted(node)


def frozen_table(flow: Dataflow, node: fx.Node) -> bool:
    """Say whether an operator looks rows up in a matrix that is not trained."""
    tables = flow.parameters(node)
    return node in flow.ops and packet_of(node.target) in LOOKUPS and bool(tables) and not any(map(_trained, tables))


def _widths(flow: Dataflow, nodes: Iterable[fx.Node]) -> list[Size]:
    """List the widths of the products of activations and a trained matrix."""
    return [flow.width(n) for n in nodes if flow.weighted(n) and any(map(_trained, flow.parameters(n)))]


def _of_weights(flow: Dataflow, start: fx.Node, others: Collection[fx.Node]) -> list[fx.Node] | None:
    """List the operators that make a value of trained weights, the module's own tensors, and `others`.

    None where it is made of more than these, or of nothing that is trained.
    """

    def leaf(n: fx.Node) -> bool:
        return n in flow.weights or n in others or n in flow.steady or n.op == "get_attr"

    operators, trained = [], False
    for n in reached([start], lambda n: () if leaf(n) else n.all_input_nodes):
        trained |= n in flow.weights and _trained(flow.weights[n])
        if not leaf(n):
            if n.op != "call_function":
                return None
            operators.append(n)
    return sorted(operators) if trained else None


def _trained(leaf: fx.Node) -> bool:
    return leaf.meta["val"].requires_grad


def _source(flow: Dataflow, base: fx.Node) -> set[fx.Node]:
    """Find the activations that a product reads, and what they are a view or a cast of."""

    def step(n: fx.Node) -> list[fx.Node]:
        return flow.inputs(n) if n in flow.ops and flow.passes(n) and len(flow.ops[n].slots) == 1 else []

    return set(reached(flow.inputs(base), step))


def _between(flow: Dataflow, node: fx.Node, base: fx.Node, source: set[fx.Node]) -> list[fx.Node] | None:
    """List the operators from a product and what that reads to a sum; None where the sum is made of more than these."""
    start = min(source, default=node)
    ends = {base, *source, *flow.adapted}

    def inside(n: fx.Node) -> bool:
        return not (n in ends or n in flow.weights or n.op == "get_attr")

    def foreign(n: fx.Node) -> bool:
        return n.op != "call_function" or n < start or frozen(flow, n)

    between = []
    for n in filter(inside, reached(node.all_input_nodes, lambda n: n.all_input_nodes if inside(n) else ())):
        if foreign(n):
            return None
        between.append(n)
    return sorted(between)
