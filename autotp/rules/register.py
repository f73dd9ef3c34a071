"""Rules for operators of your own: `register_rule` enters one, `prove_rule` proves it on your example arguments."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.comm.ranks import check_degree
from autotp.errors import InputError
from autotp.ir.graph import short_name
from autotp.proof.case import Case, Program, choices, program, required
from autotp.proof.rule import prove

from .core import RULES, Op, Rule, RuleFunction, einsum, function_of, overloads
from .notation import letters, notation

TERM = re.compile(r"[A-Za-z_]*(\.\.\.[A-Za-z_]*)?")


def register_rule(
    op: Any,
    rule: str | RuleFunction | None = None,
    *,
    linear: Sequence[str | Sequence[str]] = (),
    addends: Sequence[str] = (),
    empty: bool = True,
    replace: bool = False,
) -> Any:
    """Say how an operator may be split over the ranks; without a rule it runs whole on every one.

    Args:
        op: the operator: what `torch.library.custom_op` returns, an overload or a packet of `torch.ops`, or its name,
            "namespace::name" or "namespace::name.overload". A packet stands for all its overloads.
        rule: an einsum string with one term for every tensor argument and every result, in the schema's order, such as
            "bsk,nk->bsn". Every letter is a loop that may be split; a letter that the results lack is summed over. `_`
            is a dimension that must stay whole, `...` any number of dimensions. An optional tensor that a call leaves
            out takes its term with it; a list of tensors has one term for all. Or a function from
            `autotp.rules.Op` to `autotp.rules.Rule`. Left out, `register_rule` is a decorator of such a function.
        linear: for an einsum string, the arguments in which the operator is linear, so that partial sums pass
            through: ["x", "weight"] in either, [("x", "bias")] in both at once.
        addends: for an einsum string, the arguments that are added once after the sum (a bias).
        empty: for an einsum string, whether the operator runs on tensors without elements; ranks that a short
            dimension does not reach get some.
        replace: replace the rule that the operator has.

    Returns:
        The rule function.

    Raises:
        InputError: the operator is unknown, writes to its operands, or has a rule already; or the string does not fit
            its schema.
    """
    targets = _targets(op)
    if rule is None:
        options: dict[str, Any] = {"linear": linear, "addends": addends, "empty": empty, "replace": replace}
        return lambda function: register_rule(op, function, **options)
    if not isinstance(rule, str) and not callable(rule):
        raise InputError(
            f"the rule of {_names(targets)} is {type(rule).__name__}; give an einsum string or a function."
        )
    if not isinstance(rule, str) and (linear or addends or not empty):
        raise InputError(
            f"linear, addends and empty belong to an einsum string; the function for {_names(targets)} says the same "
            "in the Rule that it returns."
        )
    known = [t for t in targets if function_of(t) is not None]
    if known and not replace:
        raise InputError(f"{_names(known)} has a rule already. Pass replace=True to put this one in its place.")
    functions = {t: _Einsum.read(t, rule, linear, addends, empty) if isinstance(rule, str) else rule for t in targets}
    RULES.update(functions)
    return functions[targets[0]]


@dataclass(frozen=True)
class _Einsum:
    """The rule function of an einsum string: terms by argument name, and one for each result."""

    terms: dict[str, str]
    results: tuple[str, ...]
    linear: tuple[tuple[str, ...], ...]
    addends: tuple[str, ...]
    empty: bool

    def __call__(self, op: Op) -> Rule:
        results = self.results * len(op.outs) if len(self.results) == 1 else self.results
        equation = ",".join(self.terms[n] for n in op.names) + "->" + ",".join(results)
        sets = [frozenset(i for i, n in enumerate(op.names) if n in names) for names in self.linear]
        addends = frozenset(i for i, n in enumerate(op.names) if n in self.addends)
        return einsum(op, equation, linear=tuple(s for s in sets if s), addends=addends, empty=self.empty)

    @classmethod
    def read(cls, target: Any, equation: str, linear: Any, addends: Any, empty: bool) -> _Einsum:
        """Check the string and the names against the operator's schema."""
        schema, given = target._schema, f"the rule {equation!r} of {target._schema}"
        names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        kinds = [str(r.type) for r in schema.returns]
        if not kinds or any(k != "Tensor" for k in kinds) and kinds != ["List[Tensor]"]:
            raise InputError(f"{schema} returns something other than tensors, so it cannot be split: it runs whole.")
        sides = equation.replace(" ", "").split("->")
        if len(sides) != 2:
            raise InputError(f"{given} has no single '->' between its operands and its results.")
        terms, results = sides[0].split(",") if names else [], sides[1].split(",")
        for side, found, wanted in (("operands", terms, names), ("results", results, kinds)):
            if len(found) != len(wanted):
                raise InputError(
                    f"{given} has {len(found)} terms for its {side}, should be {len(wanted)}: one for each of "
                    f"{', '.join(wanted)}. An optional tensor has a term too."
                )
        _check_letters(given, terms, results)
        sets = tuple((x,) if isinstance(x, str) else tuple(x) for x in _listed(linear))
        for name in [*(n for s in sets for n in s), *_listed(addends)]:
            if name not in names:
                raise InputError(f"{given} names {name!r} in linear or addends; its tensors are {', '.join(names)}.")
        return cls(dict(zip(names, terms, strict=True)), tuple(results), sets, tuple(_listed(addends)), empty)


def _check_letters(given: str, terms: list[str], results: list[str]) -> None:
    for term in (*terms, *results):
        letters_ = [x for x in term if x.isalpha()]
        if not TERM.fullmatch(term):
            raise InputError(f"{given} has the term {term!r}; a term is letters, `_`, and `...` at most once.")
        if len(set(letters_)) != len(letters_):
            raise InputError(f"{given} has a letter twice in {term!r}. A diagonal cannot be split: write `_` there.")
    new = {x for t in results for x in t if x.isalpha()} - set("".join(terms))
    if new:
        raise InputError(
            f"{given} has {', '.join(sorted(new))} in its results alone. A dimension that no operand has stays whole: "
            "write `_` there."
        )
    if "..." in "".join(results) and "..." not in "".join(terms):
        raise InputError(f"{given} has `...` in its results alone.")


def _listed(names: Any) -> Sequence[Any]:
    return [names] if isinstance(names, str) else list(names)


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
        missed = f"; not exercised: {', '.join(self.missed)}" if self.missed else ""
        return f"{self.operator} {self.rule}: {self.choices} layouts are right at tp={self.tp}, {ways}{missed}"


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
    missed = _told(call, every - prove(case, tp))
    return Proof(short_name(target), notation(call.op, rule), tp, len(choices(call, tp)), gradients, missed)


def _program(case: Case) -> Program:
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

    def wanted(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())

    args, kwargs = compat.tree_map_only(Tensor, wanted, (case.args, case.kwargs))
    try:
        made = compat.tree_leaves(case.target(*args, **kwargs))
        results = [y for y in made if isinstance(y, Tensor) and y.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of operators without an autograd kernel
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    except (RuntimeError, Warning):
        return False
    return bool(results)


def _told(call: Program, missed: set[Any]) -> tuple[str, ...]:
    names, out = letters(call.rule or Rule()), []
    for kind, what in missed:
        slots = [what] if kind == "addend" else sorted(what) if kind == "linear" else []
        operands = " + ".join(call.operand(s) for s in slots)
        out.append(names[what] if kind == "factor" else f"{operands} as {'an addend' if kind == 'addend' else 'sums'}")
    return tuple(sorted(out))


def _targets(op: Any) -> list[Any]:
    """The overloads that an operator, or its name, stands for."""
    found = compat.operator(op)
    if found is None:
        raise InputError(
            f"{op!r} is no operator that torch knows. Give what torch.library.custom_op returned, an operator of "
            'torch.ops, or "namespace::name", after it is defined.'
        )
    targets = overloads(found)
    if not targets or any(t._schema.is_mutable for t in targets):
        raise InputError(f"{op} writes to its operands: captured graphs have no such operators, and it needs no rule.")
    return targets


def _one(op: Any) -> Any:
    targets = _targets(op)
    targets = [t for t in targets if function_of(t) is not None] or targets
    default = [t for t in targets if t._overloadname == "default"] or targets
    if len(default) != 1:
        raise InputError(f"{op} has the overloads {_names(targets)}: name one.")
    return default[0]


def _names(targets: Sequence[Any]) -> str:
    return ", ".join(map(short_name, targets))
