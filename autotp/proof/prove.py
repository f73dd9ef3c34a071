"""The public proof of a rule: every split of a call, shard by shard, forward and backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.comm.ranks import check_degree
from autotp.errors import InputError
from autotp.ir.graph import short_name
from autotp.ir.op import Rule
from autotp.rules.core import function_of
from autotp.rules.notation import letters, notation
from autotp.rules.register import _names, _targets

from .case import Case, RuleProgram, choices, program, required
from .rule import prove_program


@dataclass(frozen=True)
class Proof:
    """What `prove_rule` proved.

    Attributes:
        operator: its name. rule: the rule of this call, with a letter for each loop (see docs/rules.md).
        tp: number of simulated ranks. choices: how many ways to lay operands and results were run and compared.
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
    gradients = _has_derivative(case)
    if not gradients:
        case = replace(case, frozen=len(call.operands))
        call = program(case)
    rule = call.rule or Rule()
    every = required(call) | {("factor", i) for i in range(len(rule.factors))}
    texts = _missed_text(call, every - prove_program(call, tp))
    return Proof(short_name(target), notation(call.op, rule), tp, len(choices(call, tp)), gradients, texts)


def _program(case: Case) -> RuleProgram:
    """The call as a program, once it is seen to run on real tensors and on fake ones."""
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
    """Whether gradients reach the operands of this call."""

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
    names, out = letters(call.rule or Rule()), []
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
