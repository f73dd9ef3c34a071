"""Proofs of rules: every choice that a rule offers for one call, forward and backward, against the whole."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.comm.ranks import check_degree
from autotp.errors import InputError, RuleError
from autotp.ir.graph import short_name
from autotp.ir.op import Factor
from autotp.ir.program import Decision, Planned, Sharded
from autotp.passes.shard.axis import Result, TensorWriter
from autotp.passes.shard.rewrite import Rewriter
from autotp.rules.core import function_of, rule_of
from autotp.rules.notation import letters, notation
from autotp.rules.register import _names, _targets

from .case import TOLERANCE, Case, RuleOf, RuleProgram, choices, program, required
from .differences import Parts, Rounding, differences, gradients
from .run import Simulated, run


class _AsProduced(TensorWriter):
    """Writer of programs whose results keep the layouts that the choice produces."""

    def results(self, planned: Planned) -> list[Result]:
        (call,) = planned.ops
        return [Result(call, (call, i), x) for i, x in enumerate(planned.decisions[call].outs)]


def prove(case: Case, tp: int, rule: RuleOf = rule_of) -> set[Any]:
    """Prove every choice of a case on simulated ranks.

    Args:
        case: one call of an operator, with its tensors. tp: ranks. rule: stands in for the table of rules.

    Returns: what was exercised of the rule: factors, linear sets, addends.

    Raises:
        RuleError: a choice fails, or its results or gradients differ from the whole's.
    """
    return prove_program(program(case, rule), tp)


def prove_program(p: RuleProgram, tp: int) -> set[Any]:
    """Prove a call whose program is made already, which serves any number of ranks; see `prove`."""
    p.planned.tp = tp
    draw = torch.Generator().manual_seed(0)
    whole = [x.clone().requires_grad_(s in p.planned.grads) for x, s in zip(p.operands, p.op.slots, strict=True)]
    (results,) = run(p.planned.program, dict(zip(p.leaves, ([x] for x in whole), strict=True))).outputs
    grads = [_gradient(y, draw) for y in results]
    expected = _Expected([y.detach() for y in results], grads, gradients(results, grads, whole))
    exercised = set()
    for decision, factor in choices(p, tp):
        try:
            _prove(p, decision, expected)
        except Exception as e:
            raise RuleError(_fault_text(p, decision, factor, e)) from e
        exercised |= _exercised(p, decision, factor)
    return exercised


@dataclass
class _Expected:
    """The reference: results of the whole, the gradients that they were given, and the operands' gradients."""

    results: list[Tensor]
    gradients_in: Sequence[Tensor | None]
    gradients: list[Tensor | None]


class _Differs(Exception):
    """A fault of one choice."""


def _fault_text(p: RuleProgram, decision: Decision, factor: Factor | None, error: Exception) -> str:
    """Write the fault, the choice that has it, the likely cause and the advice."""
    rule, tp = p.rule, p.planned.tp
    partial = [p.operand(i) for i, x in enumerate(decision.ins) if x.partial]
    what, advice = "run whole", "The operator must give the same results for the same operands."
    if factor is not None and decision.factor is not None:
        letter = letters(rule)[decision.factor]
        summed = any(c is None for c in factor.outs)
        what = f"split along {letter}" + (", which is summed over" if summed else "")
        need = f"The parts along {letter} must not depend on each other; arguments that say its length need `localise`."
        if summed:
            need = f"The result must be the sum of what the parts along {letter} give."
        advice = f"{need} Where that is not so, the dimension must stay whole: write `_` for it, or no factor."
        if decision.loop is not None and not decision.loop.full(tp):
            advice += " Some rank has no element here: where the operator cannot run on that, say empty=False."
    elif partial:
        what = f"given summands of {' and '.join(partial)}"
        advice = f"It is not linear in {' and '.join(partial)}: correct `linear`."
    layouts = ", ".join(f"{p.operand(i)} {x}" for i, x in enumerate(decision.ins))
    fault = str(error) if isinstance(error, _Differs) else f"it fails: {error}"
    return (
        f"the rule of {short_name(p.op.target)}, {notation(p.op, rule)}, is wrong: {what}, over {tp} ranks, {fault}\n"
        f"  {layouts} -> {', '.join(map(str, decision.outs))}\n  {p.case}\n{advice}"
    )


def _gradient(y: Tensor, draw: torch.Generator) -> Tensor | None:
    """Draw a gradient for a result, whole numbers where the dtype is narrow, so that nothing rounds; None for none."""
    if not y.requires_grad:
        return None
    if y.dtype in (torch.float64, torch.complex128):
        return torch.randn(y.shape, generator=draw, dtype=y.dtype).to(y.device)
    return torch.randint(-3, 4, y.shape, generator=draw).to(y.device, y.dtype)


def _exercised(p: RuleProgram, decision: Decision, factor: Factor | None) -> set[Any]:
    summands = frozenset(i for i, x in enumerate(decision.ins) if x.partial)
    if factor is not None:
        return {("factor", decision.factor), *(("addend", s) for s in p.rule.addends if s in summands)}
    return {("linear", summands)} if summands else set()


def decided(p: RuleProgram, decision: Decision) -> Sharded:
    """Return the ranks' program of a choice: its operands and results have the layouts of the choice."""
    p.planned.decisions = {
        **{n: Decision((), (x,)) for n, x in zip(p.leaves, decision.ins, strict=True)},
        p.node: decision,
    }
    return Rewriter(p.planned, None, _AsProduced()).run()


def _prove(p: RuleProgram, decision: Decision, expected: _Expected) -> None:
    """Run one choice on all ranks, and compare its results and gradients with the whole's.

    Raises:
        _Differs: they are not the same.
    """
    sharded, tp = decided(p, decision), p.planned.tp
    operands = _operand_parts(p, decision)
    placeholders = sharded.graph.find_nodes(op="placeholder")
    ranks = run(sharded, dict(zip(placeholders, operands, strict=True)), Simulated(tp)).outputs
    ours, theirs = {}, {}
    for i, (layout, whole) in enumerate(zip(decision.outs, expected.results, strict=True)):
        ours[f"result {i}"], theirs[f"result {i}"] = Parts([y[i] for y in ranks], p.spec(layout)), whole
    _judge(p.case, ours, theirs)
    # Before any gradient is asked for: torch would say of a result that is cut off no more than that it is.
    _check_reached(ranks, expected)
    upstream, computed = _upstream_parts(p, decision, expected), list[list[Tensor | None]]()
    for rank, outputs in enumerate(ranks):
        toward = [parts[rank] for parts in upstream]
        computed.append(gradients(outputs, toward, [parts[rank] for parts in operands]))
    ours, theirs = {}, {}
    for i, (layout, whole) in enumerate(zip(decision.ins, expected.gradients, strict=True)):
        reached, name = [g for grads in computed if (g := grads[i]) is not None], p.operand(i)
        if len(reached) != tp * (whole is not None):
            raise _Differs(f"{name} has a gradient on some ranks and none on others")
        if whole is not None:
            key = f"the gradient of {name}"
            ours[key], theirs[key] = Parts(reached, p.spec(layout.dual)), whole
    _judge(p.case, ours, theirs)


def _operand_parts(p: RuleProgram, decision: Decision) -> list[list[Tensor]]:
    """Return each rank's part of every operand, as a leaf of its own."""
    out = []
    for i, (x, layout, slot) in enumerate(zip(p.operands, decision.ins, p.op.slots, strict=True)):
        if layout.partial and x.dtype == torch.bool:
            raise _Differs("a truth value has no summands")
        parts, graded = p.spec(layout).split(x, p.planned.tp, i), slot in p.planned.grads
        out.append([part.clone().requires_grad_(graded) for part in parts])
    return out


def _upstream_parts(p: RuleProgram, decision: Decision, expected: _Expected) -> list[list[Any]]:
    """Return each rank's part of the gradient of every result, whose layout is the dual of the result's."""
    out = []
    for whole, layout in zip(expected.gradients_in, decision.outs, strict=True):
        tp = p.planned.tp
        out.append([None] * tp if whole is None else p.spec(layout).dual.split(whole, tp, 7))
    return out


def _check_reached(rank_results: Sequence[Sequence[Tensor]], expected: _Expected) -> None:
    """Check that on every rank the results which carry a gradient are those of the whole."""
    if all(g is None for g in expected.gradients):
        return
    for rank, results in enumerate(rank_results):
        for i, (result, gradient) in enumerate(zip(results, expected.gradients_in, strict=True)):
            if result.requires_grad != (gradient is not None):
                raise _Differs(f"on rank {rank} result {i} is cut off from the gradient, or carries one of its own")


def _judge(case: Case, ours: dict[str, Parts], theirs: dict[str, Tensor]) -> None:
    """Compare the ranks' parts with the whole.

    Raises:
        _Differs: at the first that differs.
    """
    gap = differences(ours, theirs, _Elementwise(0.0, case=case))
    if gap is not None:
        raise _Differs(f"{gap.key} is wrong by {gap.error:.3g}")


@dataclass
class _Elementwise(Rounding):
    """A comparison of every element by itself, within what its case allows."""

    case: Case = field(kw_only=True)

    def error(self, ours: Tensor, theirs: Tensor, scale: float) -> float:
        """Return the largest error of an element; 0 where all are within the tolerance."""
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("inf")
        if not self.case.values or _close(ours, theirs, self.case.tolerance):
            return 0.0
        number = ours.dtype != torch.bool
        return max((ours - theirs).abs().max().item(), TOLERANCE) if number else float("inf")


def _close(a: Tensor, b: Tensor, tolerance: float | None) -> bool:
    if torch.equal(a, b):  # as most are; `allclose` takes far longer
        return True
    if not (b.is_floating_point() or b.is_complex()):
        return False
    if tolerance is None and b.dtype not in (torch.float64, torch.complex128):
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError:
            return False
        return True
    limit = TOLERANCE if tolerance is None else tolerance
    return torch.allclose(a, b, limit, limit, equal_nan=True)


# ---- the public proof ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """A proof by `prove_rule`.

    Attributes:
        operator: its name. rule: the rule of this call, with a letter for each loop (see docs/rules.md).
        tp: number of simulated ranks. choices: how many layouts of operands and results were run and compared.
        gradients: whether the operator has a derivative; if so the gradients were compared too.
        missed: loops and sums that these arguments could not exercise, as a dimension of size 1.
    """

    operator: str
    rule: str
    tp: int
    choices: int
    gradients: bool
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        ways = "forward and backward" if self.gradients else "forward; the operator has no derivative"
        rest = f"; not exercised: {', '.join(self.missed)}" if self.missed else ""
        return f"{self.operator} {self.rule}: {self.choices} layouts are right at tp={self.tp}, {ways}{rest}"


def prove_rule(op: Any, *args: Any, tp: int = 2, **kwargs: Any) -> Proof:
    """Prove an operator's rule on one call: split the operands every way that the rule offers, run each rank's part,
    put the results together, and compare them and the gradients with the whole's.

    Args:
        op: as for `autotp.register_rule`; one overload.
        args, kwargs: the call's arguments. Give tensors in float64, which are compared within 1e-10; narrower ones are
            compared within what `torch.testing` allows, and should hold small whole numbers. Dimensions of at least
            2 * tp elements are split in every way.
        tp: number of ranks to simulate in this process.

    Returns:
        A `Proof`, which prints as one line.

    Raises:
        RuleError: the rule is wrong; the message says along which loop, in which result or gradient, and by how much.
        InputError: the operator is unknown or has no rule, or does not run on these arguments.
    """
    target = _one(op)
    if function_of(target) is None:
        raise InputError(
            f"{short_name(target)} has no rule to prove: it runs whole. autotp.register_rule gives it one."
        )
    if check_degree(tp) < 2:
        raise InputError("one rank has nothing to split; prove a rule with tp=2 or more.")
    case = Case(target, args, kwargs, tolerance=None)
    call = _program(case)
    graded = _has_derivative(case)
    if not graded:
        case = replace(case, frozen=len(call.operands))
        call = program(case)
    every = required(call) | {("factor", i) for i in range(len(call.rule.factors))}
    texts = _missed_text(call, every - prove_program(call, tp))
    return Proof(short_name(target), notation(call.op, call.rule), tp, len(choices(call, tp)), graded, texts)


def _program(case: Case) -> RuleProgram:
    """Return the call as a program, after a check that it runs on real tensors and on fake ones."""
    name = short_name(case.target)
    if not [x for x in compat.tree_leaves((case.args, case.kwargs)) if isinstance(x, Tensor)]:
        raise InputError(f"autotp.prove_rule({name}, ...) got no tensor: give the arguments of an example call.")
    try:
        with torch.no_grad():
            case.target(*case.args, **case.kwargs)
    except Exception as e:
        raise InputError(f"{case} does not run: {e}") from e
    try:
        fake = compat.fake_mode()
        args, kwargs = compat.tree_map_only(Tensor, fake.from_tensor, (case.args, case.kwargs))
        with fake:
            case.target(*args, **kwargs)
    except Exception as e:
        raise InputError(
            f"{name} does not run on fake tensors, which torch.export needs; register_fake gives it their shapes: {e}"
        ) from e
    return program(case)


def _has_derivative(case: Case) -> bool:
    """Return whether gradients reach the operands of this call."""

    def trainable(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())

    args, kwargs = compat.tree_map_only(Tensor, trainable, (case.args, case.kwargs))
    try:
        results = compat.tree_leaves(case.target(*args, **kwargs))
        results = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of operators without an autograd kernel
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    except (RuntimeError, Warning):
        return False
    return bool(results)


def _missed_text(call: RuleProgram, parts: set[Any]) -> tuple[str, ...]:
    names, out = letters(call.rule), []
    for kind, what in parts:
        if kind == "factor":
            out.append(names[what])
        elif kind == "addend":
            out.append(f"{call.operand(what)} as an addend")
        else:
            out.append(f"{' + '.join(call.operand(s) for s in sorted(what))} as sums")
    return tuple(sorted(out))


def _one(op: Any) -> Any:
    targets = _targets(op)
    targets = [t for t in targets if function_of(t) is not None] or targets
    default = [t for t in targets if t._overloadname == "default"] or targets
    if len(default) != 1:
        raise InputError(f"{op} has the overloads {_names(targets)}: name one.")
    return default[0]
