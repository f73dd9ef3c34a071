"""The proof of one operator call: every choice that its rule offers, forward and backward, against the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat, conversions, simulate, slices
from autotp.capture import Capture, Leaf
from autotp.graph import differentiable
from autotp.layouts import Layout, Partial, Partition, Segment, divide
from autotp.plan import Decision
from autotp.planner import Planned
from autotp.problem import ValueId
from autotp.rewrite import Rewriter
from autotp.rules.core import Factor, Op, Rule, rule_of
from autotp.slices import to_runtime
from autotp.strategies import Candidates, place, signatures

TOLERANCE = 1e-10


@dataclass
class Case:
    """One call of an operator: its arguments, with tensors where they are tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    frozen: int = 0  # of the last operands, how many have no gradient
    reference: Callable[..., Any] | None = None  # what to compare with, where torch has no derivative
    values: bool = True  # False: only shapes are compared (uninitialised or random results)

    def __str__(self) -> str:
        def show(x: Any) -> str:
            return f"{str(x.dtype)[6:9]}{list(x.shape)}" if isinstance(x, Tensor) else str(x)

        given = [str(compat.tree_map(show, a)).replace("'", "") for a in self.args]
        return f"{self.target}({', '.join([*given, *(f'{k}={show(v)}' for k, v in self.kwargs.items())])})"


class ProofError(AssertionError):
    """A choice of a rule does not compute what the operator computes."""


@dataclass
class Program:
    """The call as a captured graph of one operator, with its operands."""

    planned: Planned
    node: fx.Node
    op: Op
    rule: Rule | None
    operands: list[Tensor]


def program(case: Case, tp: int, rule: Callable[[Op], Rule | None] = rule_of) -> Program:
    """The one-operator graph of a case; `rule` stands in for the table (negative controls)."""
    graph, mode, operands = fx.Graph(), compat.fake_mode(), []
    leaves: list[Leaf] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(operands)}")
        node.meta["val"] = mode.from_tensor(x, static_shapes=True)
        leaves.append(Leaf(node, "parameter", node.name))
        operands.append(x)
        return node

    args, kwargs = compat.tree_map(leaf, (case.args, case.kwargs))
    node = graph.call_function(case.target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = case.target(*fake_args, **fake_kwargs)
    graph.output(node)
    for last in leaves[len(leaves) - case.frozen :]:
        last.kind = "buffer"
    nothing: Any = None
    captured = Capture(graph, leaves, {}, nothing, nothing, {}, {}, {}, {}, [], False)
    op = Op.of(node)
    found = rule(op)
    planned = Planned(captured, tp, {}, {node: op}, {node: found}, {}, differentiable(captured))
    return Program(planned, node, op, found, operands)


def loops_to_try(factor: Factor, tp: int) -> Iterator[Partition]:
    """Partitions of a loop: plain, in units, fused of two unequal segments, and repeated."""
    if factor.pieces:
        lengths = [n for n in factor.pieces if isinstance(n, int)]
        yield Partition.of([Segment(n) for n in lengths], 1, tp)
        yield Partition.of([Segment(n // 2, 2) if n % 2 == 0 else Segment(n) for n in lengths], 1, tp)
        return
    size = factor.size
    yield Partition.plain(size, tp)
    half = divide(size, 2)
    if half is not None and half != 1:
        yield Partition.of([Segment(half, 2)], 1, tp)
        yield Partition.of([Segment(half, 1)], 2, tp)
    if isinstance(size, int) and size > 2:
        yield Partition.of([Segment(size - 2, 1), Segment(2, 1)], 1, tp)


def choices(p: Program, tp: int) -> list[tuple[Decision, Factor | None]]:
    """Every choice that the planner would have for this call, with the partitions of `loops_to_try` as seeds."""
    candidates = Candidates(tp)
    slots: list[frozenset[ValueId]] = [frozenset([("in", i)]) for i in range(len(p.op.ins))]
    results: list[ValueId] = [("out", i) for i in range(len(p.op.outs))]
    values = [*(v for s in slots for v in s), *results]
    for factor in p.rule.factors if p.rule else ():
        for loop in loops_to_try(factor, tp) if factor.size != 1 else ():
            for carry, value in zip((*factor.ins, *factor.outs), values, strict=True):
                part = place(carry, factor, loop, tp) if carry is not None else None
                if carry is not None and part is not None and part not in candidates.of[value, carry.dim]:
                    candidates.of[value, carry.dim].append(part)
    grads = p.planned.grads
    carries = [p.node in grads] * len(p.op.outs)
    found: dict[Any, tuple[Decision, Factor | None]] = {}
    for ins, outs, k, loop in signatures(p.rule, [s in grads for s in p.op.slots], carries, slots, results, candidates):
        factor = p.rule.factors[k] if p.rule and k is not None else None
        found.setdefault((ins, outs), (Decision(ins, outs, k, loop), factor))
    return list(found.values())


class _Forced(Rewriter):
    """The rewriting of one call whose operands lie as the choice wants them, and whose results stay as produced."""

    def _routes(self) -> dict[Any, Any]:
        return {}

    def _outputs(self, node: fx.Node) -> Any:
        call: fx.Node = node.args[0]  # type: ignore[assignment]
        return [self.held[(call, i), x] for i, x in enumerate(self.planned.decisions[call].outs)]


def prove(case: Case, tp: int, rule: Callable[[Op], Rule | None] = rule_of) -> set[Any]:
    """Prove every choice of a case on `tp` simulated ranks; returns what was exercised: factors, linear sets, addends.

    Raises:
        ProofError: results or gradients differ from the whole's.
    """
    p = program(case, tp, rule)
    whole = [x.clone().requires_grad_(s in p.planned.grads) for x, s in zip(p.operands, p.op.slots, strict=True)]
    results = _call(case, whole)
    grads = [_gradient(y) if y.requires_grad else None for y in results]
    expected = _gradients(results, grads, whole)
    exercised: set[Any] = set()
    for decision, factor in choices(p, tp):
        try:
            _prove(p, decision, tp, [y.detach() for y in results], grads, expected, case.values)
        except Exception as e:
            told = ", ".join(map(str, decision.ins)), ", ".join(map(str, decision.outs)), decision.loop
            raise ProofError(f"{case} on {tp} ranks, {told[0]} -> {told[1]} by {told[2]}: {e}") from e
        exercised |= _exercised(p, decision, factor)
    return exercised


def _gradient(y: Tensor) -> Tensor:
    """Random; whole numbers where the dtype is narrow, so that no rounding enters."""
    return torch.randn_like(y) if y.dtype in (torch.float64, torch.complex128) else torch.randint_like(y, -3, 4)


def _exercised(p: Program, decision: Decision, factor: Factor | None) -> set[Any]:
    assert p.rule is not None or factor is None
    if factor is not None and p.rule is not None:
        added = {("addend", s) for s in p.rule.addends if isinstance(decision.ins[s], Partial)}
        return {("factor", decision.factor), *added}
    return {("linear", frozenset(i for i, x in enumerate(decision.ins) if isinstance(x, Partial)))} - {
        ("linear", frozenset())
    }


def required(p: Program) -> set[Any]:
    """What the cases of an operator must exercise of this call's rule."""
    if p.rule is None:
        return set()
    factors = {("factor", i) for i, f in enumerate(p.rule.factors) if f.size not in (0, 1)}
    return factors | {("linear", s) for s in p.rule.linear} | {("addend", s) for s in p.rule.addends}


def _call(case: Case, operands: Sequence[Tensor]) -> list[Tensor]:
    given = iter(operands)
    args, kwargs = compat.tree_map_only(Tensor, lambda _: next(given), (case.args, case.kwargs))
    got = (case.reference or case.target)(*args, **kwargs)
    return list(got) if isinstance(got, list | tuple) else [got]


def _gradients(
    results: Sequence[Tensor], grads: Sequence[Tensor | None], operands: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of the operands; None for those that need none or are not reached."""
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None]
    wanted = [x for x in operands if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(operands)
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in operands]


def _summands(x: Tensor, layout: Layout, tp: int, seed: int) -> list[Tensor]:
    if isinstance(layout, Partial) and x.dtype == torch.bool:
        raise ProofError("a truth value has no summands")
    return slices.split(x, to_runtime(layout), tp, seed)


def _prove(
    p: Program, decision: Decision, tp: int, results: list[Tensor], grads: Sequence[Tensor | None],
    expected: list[Tensor | None], values: bool,
) -> None:  # fmt: skip
    leaves = [leaf.node for leaf in p.planned.program.leaves]
    p.planned.decisions = {n: Decision((), (x,)) for n, x in zip(leaves, decision.ins, strict=True)}
    p.planned.decisions[p.node] = decision
    sharded = _Forced(p.planned, None, "full").run()
    held = [
        [part.clone().requires_grad_(s in p.planned.grads) for part in _summands(x, layout, tp, i)]
        for i, (x, layout, s) in enumerate(zip(p.operands, decision.ins, p.op.slots, strict=True))
    ]
    placeholders = [n for n in sharded.graph.nodes if n.op == "placeholder"]
    got = simulate.run(sharded, tp, dict(zip(placeholders, held, strict=True)))
    for i, (y, layout) in enumerate(zip(results, decision.outs, strict=True)):
        _compare(f"result {i}", [rank[i].detach() for rank in got], layout, y, values)
    duals = [
        [None] * tp if g is None else slices.split(g, conversions.dual(to_runtime(x)), tp, 7)
        for g, x in zip(grads, decision.outs, strict=True)
    ]
    for rank in range(tp):
        dead = [i for i, g in enumerate(grads) if (g is not None) != got[rank][i].requires_grad]
        if dead and any(expected_ is not None for expected_ in expected):
            raise ProofError(f"on rank {rank} result {dead[0]} is cut off from the gradient, or carries one of its own")
    found = [_gradients(got[r], [d[r] for d in duals], [h[r] for h in held]) for r in range(tp)]
    for i, (g, layout) in enumerate(zip(expected, decision.ins, strict=True)):
        parts = [found[r][i] for r in range(tp)]
        if g is None or any(x is None for x in parts):
            if g is not None or any(x is not None for x in parts):
                raise ProofError(f"operand {i} has a gradient on some ranks and none on others")
            continue
        _compare(f"the gradient of operand {i}", parts, layout.dual, g, values)  # type: ignore[arg-type]


def _compare(what: str, parts: list[Tensor], layout: Layout, whole: Tensor, values: bool) -> None:
    spec = to_runtime(layout)
    joined = slices.recombine(parts, spec)
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        raise ProofError(f"{what} is {joined.dtype} {list(joined.shape)}, should be {whole.dtype} {list(whole.shape)}")
    if not values:
        return
    if spec[0] in "IR" and not all(_close(x, joined) for x in parts):
        raise ProofError(f"{what} differs from rank to rank")
    if not _close(joined, whole):
        raise ProofError(f"{what} is wrong by {(joined.to(whole.dtype) - whole).abs().max().item():.3g}")


def _close(a: Tensor, b: Tensor) -> bool:
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True)
