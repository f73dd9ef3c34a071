"""Rules for operators of your own: `register_rule` enters one, `prove_rule` proves it on your example arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from autotp import compat
from autotp.errors import InputError
from autotp.ir.graph import short_name

from .core import RULES, RuleFunction, function_of, overloads
from .notation import einsum

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
    with_rule = [t for t in targets if function_of(t) is not None]
    if with_rule and not replace:
        raise InputError(f"{_names(with_rule)} has a rule already. Pass replace=True to put this one in its place.")
    if isinstance(rule, str):
        functions: dict[Any, RuleFunction] = {t: _read(t, rule, linear, addends, empty) for t in targets}
    else:
        functions = dict.fromkeys(targets, rule)
    RULES.update(functions)
    return functions[targets[0]]


def _read(target: Any, equation: str, linear: Any, addends: Any, empty: bool) -> RuleFunction:
    """Check an einsum string and names against an operator's schema, and make its rule function."""
    # Checked here rather than at the operator's first call: the line that wrote the rule is on the stack.
    schema, what = target._schema, f"the rule {equation!r} of {target._schema}"
    names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    kinds = [str(r.type) for r in schema.returns]
    if not kinds or any(k != "Tensor" for k in kinds) and kinds != ["List[Tensor]"]:
        raise InputError(f"{schema} returns something other than tensors, so it cannot be split: it runs whole.")
    sides = equation.replace(" ", "").split("->")
    if len(sides) != 2:
        raise InputError(f"{what} has no single '->' between its operands and its results.")
    # An operator that takes no tensor has no term on the left, where splitting an empty text would give one.
    terms, results = sides[0].split(",") if names else [], sides[1].split(",")
    for side, own_terms, slots in (("operands", terms, names), ("results", results, kinds)):
        if len(own_terms) != len(slots):
            raise InputError(
                f"{what} has {len(own_terms)} terms for its {side}, should be {len(slots)}: one for each of "
                f"{', '.join(slots)}. An optional tensor has a term too."
            )
    _check_letters(what, terms, results)
    sets, added = [_as_sequence(x) for x in _as_sequence(linear)], _as_sequence(addends)
    for name in [*(n for s in sets for n in s), *added]:
        if name not in names:
            raise InputError(f"{what} names {name!r} in linear or addends; its tensors are {', '.join(names)}.")
    options: dict[str, Any] = {"linear": " or ".join(map(" + ".join, sets)), "addends": " ".join(added), "empty": empty}
    return partial(einsum, notation=equation, **options)


def _check_letters(what: str, terms: list[str], results: list[str]) -> None:
    for term in (*terms, *results):
        letters_ = [x for x in term if x.isalpha()]
        if not TERM.fullmatch(term):
            raise InputError(f"{what} has the term {term!r}; a term is letters, `_`, and `...` at most once.")
        if len(set(letters_)) != len(letters_):
            raise InputError(f"{what} has a letter twice in {term!r}. A diagonal cannot be split: write `_` there.")
    new = {x for t in results for x in t if x.isalpha()} - set("".join(terms))
    if new:
        raise InputError(
            f"{what} has {', '.join(sorted(new))} in its results alone. A dimension that no operand has stays whole: "
            "write `_` there."
        )
    if "..." in "".join(results) and "..." not in "".join(terms):
        raise InputError(f"{what} has `...` in its results alone.")


def _as_sequence(names: Any) -> Sequence[Any]:
    return [names] if isinstance(names, str) else list(names)


def _targets(op: Any) -> list[Any]:
    """List the overloads that an operator, or its name, stands for."""
    operator = compat.operator(op)
    if operator is None:
        raise InputError(
            f"{op!r} is no operator that torch knows. Give what torch.library.custom_op returned, an operator of "
            'torch.ops, or "namespace::name", after it is defined.'
        )
    targets = overloads(operator)
    if not targets or any(t._schema.is_mutable for t in targets):
        raise InputError(f"{op} writes to its operands: captured graphs have no such operators, and it needs no rule.")
    return targets


def _names(targets: Sequence[Any]) -> str:
    return ", ".join(map(short_name, targets))
