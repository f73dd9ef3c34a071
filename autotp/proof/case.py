"""Operator calls as programs of one node, with every choice that the planner would have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autotp import compat
from autotp.cost.solver.problem import ValueId
from autotp.ir.graph import BUFFER, PARAMETER, Capture, Leaf, differentiable, short_name
from autotp.ir.layouts import Distribution, Groups, Layout, Partition, Segment, divide
from autotp.ir.op import Factor, Op, Rule
from autotp.ir.program import Decision, Planned
from autotp.ir.specs import Spec
from autotp.passes.shard.strategies import Candidates, signatures
from autotp.rules.core import rule_of

TOLERANCE = 1e-10  # in float64
RuleOf = Callable[[Op], Rule | None]


@dataclass(eq=False)  # tensors are not compared; each call is itself
class Case:
    """One call of an operator: its arguments, with tensors where they are tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    frozen: int = 0  # of the last operands, how many have no gradient
    values: bool = True  # False: only shapes are compared (uninitialised or random results)
    tolerance: float | None = TOLERANCE  # None: TOLERANCE in float64, else what torch.testing allows

    def __str__(self) -> str:
        def show(x: Any) -> str:
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else str(x)

        arguments = [str(compat.tree_map(show, a)).replace("'", "") for a in self.args]
        arguments += [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        return f"{short_name(self.target)}({', '.join(arguments)})"


@dataclass
class RuleProgram:
    """A call as a captured graph of one operator, with its operands."""

    case: Case
    planned: Planned
    node: fx.Node
    op: Op
    rule: Rule
    operands: list[Tensor]

    @property
    def leaves(self) -> list[fx.Node]:
        """The operands in the graph."""
        return [leaf.node for leaf in self.planned.program.leaves]

    def operand(self, slot: int) -> str:
        """Return the name of an operand, numbered where one argument holds several."""
        name = self.op.names[slot]
        return name if self.op.names.count(name) == 1 else f"{name}[{slot - self.op.names.index(name)}]"

    def spec(self, layout: Layout) -> Spec:
        """Return a layout at run time; that of rows by group holds the operand which says where the groups end."""
        carries = [c for f in self.rule.factors for c in f.carries if c is not None]
        ends = next((self.operands[c.groups] for c in carries if c.groups is not None), None)
        return layout.to_runtime(lambda size: ends if isinstance(size, Groups) else size)


def program(case: Case, rule: RuleOf = rule_of) -> RuleProgram:
    """Build the one-operator graph of a case; `rule` stands in for the table (negative controls)."""
    graph, mode, operands = fx.Graph(), compat.fake_mode(), []
    leaves = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(operands)}")
        node.meta["val"] = mode.from_tensor(x.detach(), static_shapes=True)
        leaves.append(Leaf(node, PARAMETER, node.name))
        operands.append(x.detach())
        return node

    args, kwargs = compat.tree_map(leaf, (case.args, case.kwargs))
    node = graph.call_function(case.target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = case.target(*fake_args, **fake_kwargs)
    graph.output(node)
    for last in leaves[max(len(leaves) - case.frozen, 0) :]:
        last.kind = BUFFER
    nothing: Any = None
    captured = Capture(graph, leaves, {}, nothing, nothing, {}, {}, {}, {}, [], False)
    op = Op.of(node)
    planned = Planned(captured, 1, {}, {node: op}, {node: rule(op)}, {}, differentiable(captured))
    return RuleProgram(case, planned, node, op, planned.rules[node] or Rule(), operands)


def loops_to_try(factor: Factor, tp: int) -> Iterator[Partition]:
    """Yield partitions of a loop: plain, in units, fused of two unequal segments, and repeated."""
    if factor.pieces:
        lengths = [n for n in factor.pieces if isinstance(n, int)]
        yield Partition.of([Segment(n) for n in lengths], 1, tp)
        yield Partition.of([_halves(n) for n in lengths], 1, tp)
        return
    size = factor.size
    yield Partition.plain(size, tp)
    half = divide(size, 2)
    if half is not None and half != 1:
        yield Partition.of([Segment(half, 2)], 1, tp)
        yield Partition.of([Segment(half, 1)], 2, tp)
    if isinstance(size, int) and size > 2:
        yield Partition.of([Segment(size - 2, 1), Segment(2, 1)], 1, tp)


def _halves(n: int) -> Segment:
    """Return a piece of two units where its length is even."""
    return Segment(n // 2, 2) if n % 2 == 0 else Segment(n)


def choices(p: RuleProgram, tp: int) -> list[tuple[Decision, Factor | None]]:
    """Return every choice that the planner would have for this call, with the partitions of `loops_to_try` as seeds."""
    slots: list[frozenset[ValueId]] = [frozenset([("in", i)]) for i in range(len(p.op.ins))]
    candidates = Candidates(tp, ends={("in", i): i for i in range(len(p.op.ins))})
    results: list[ValueId] = [("out", i) for i in range(len(p.op.outs))]
    values: list[ValueId] = [*(v for s in slots for v in s), *results]
    for factor in p.rule.factors:
        # A loop of one step has nothing to split.
        for loop in loops_to_try(factor, tp) if factor.size != 1 else ():
            _seed(candidates, factor, loop, slots, values)
    grads = p.planned.grads
    graded = [s in grads for s in p.op.slots]
    carries = [p.node in grads] * len(p.op.outs)
    decisions = {}
    for ins, outs, k, loop in signatures(p.planned.rules[p.node], graded, carries, slots, results, candidates):
        factor = p.rule.factors[k] if k is not None else None
        decisions.setdefault((ins, outs), (Decision(ins, outs, k, loop), factor))
    return list(decisions.values())


def _seed(
    candidates: Candidates, factor: Factor, loop: Distribution, slots: list[frozenset[ValueId]], values: list[ValueId]
) -> None:
    """Let every value that carries the factor have the partition that the loop gives it.

    Not by `Candidates.add`, which keeps the simplest few: a proof tries all.
    """
    for carry, value in zip(factor.carries, values, strict=True):
        if carry is not None:
            part = candidates.place(carry, factor, loop, slots)
            if part is not None and part not in candidates.of[value, carry.dim]:
                candidates.of[value, carry.dim].append(part)


def required(p: RuleProgram) -> set[Any]:
    """Return the factors, linear sets and addends of this call's rule that the operator's cases must exercise."""
    maxima = p.node in p.planned.grads  # which carry no gradient, and are no choice where one is wanted
    possible = [not (f.size in (0, 1) or (maxima and f.reduction == "max" and None in f.outs)) for f in p.rule.factors]
    factors = {("factor", i) for i, can in enumerate(possible) if can}
    linear = {("linear", s) for s in p.rule.linear}
    addends = {("addend", s) for s in p.rule.addends}
    return factors | linear | addends
