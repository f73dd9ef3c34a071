"""Definition of an operator rule: the operator's factors (independent loops), said per operand slot and per result.

Splitting a factor over the ranks means: operands that carry it are sharded there, operands that lack it are
replicated, results that carry it are sharded, results that lack it (the factor is contracted) are partial. Rules never
mention ranks or layouts; strategies are made from them in `autotp.passes.shard.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autotp.compat import OpOverloadPacket
from autotp.errors import RuleError

if TYPE_CHECKING:
    from .local import ShardCall
from autotp.ir.op import Carry, Factor, Localise, Op, Rule, Shape

RuleFunction = Callable[[Op], Rule]
RULES: dict[Any, RuleFunction] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Enter a rule function in the table for these operators (overloads, or packets for all their overloads)."""

    def enter(function: RuleFunction) -> RuleFunction:
        for target in targets:
            RULES.update(dict.fromkeys(overloads(target), function))
        return function

    return enter


def overloads(target: Any) -> list[Any]:
    """An overload itself; of a packet those overloads that do not write to their operands."""
    if not isinstance(target, OpOverloadPacket):
        return [target]
    members = [getattr(target, name) for name in target.overloads()]
    return [overload for overload in members if not overload._schema.is_mutable]


def rule_of(op: Op) -> Rule | None:
    """The rule of this call, or None where the operator has none (it then runs whole)."""
    function = function_of(op.target)
    if function is None:
        return None
    rule = function(op)
    if not isinstance(rule, Rule):
        raise RuleError(f"the rule of {op.target} gave {type(rule).__name__}, should be autotp.rules.Rule")
    for f in rule.factors:
        if len(f.ins) != len(op.ins) or len(f.outs) != len(op.outs):
            raise RuleError(
                f"the rule of {op.target} gives {len(f.ins)} operands and {len(f.outs)} results for a call with "
                f"{len(op.ins)} and {len(op.outs)}: {op.node.format_node()}"
            )
    return replace(rule, linear=tuple(s for s in rule.linear if _summable(op, s)))


def function_of(target: Any) -> RuleFunction | None:
    """The rule function of an operator: its entry in the table, the one that a function of ours brings, or that of all
    which torch tags as pointwise."""
    function = RULES.get(target) or RULES.get(str(target)) or getattr(target, "rule", None)
    return RULES["pointwise"] if function is None and _pointwise(target) else function


def _summable(op: Op, slots: Iterable[int]) -> bool:
    """Say whether these operands can be sums over the ranks, and the results with them: truth values cannot."""
    results = op.node.meta.get("val")
    results = results if isinstance(results, list | tuple) else (results,)
    values = [op.slots[s].meta["val"] for s in slots]
    return not any(isinstance(v, torch.Tensor) and v.dtype == torch.bool for v in (*values, *results))


def _pointwise(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or schema is None or schema.is_mutable:
        return False
    return "generator" not in str(schema) and all(str(r.type) == "Tensor" for r in schema.returns)


Label = Any


def loops(op: Op, ins: Sequence[Sequence[Label]], outs: Sequence[Sequence[Label]], **rule_fields: Any) -> Rule:
    """The rule of an operator whose slots' dimensions are labelled: equal labels are one loop, None is no loop.

    A label that no result carries is contracted.

    Args:
        op: the call. ins, outs: a label for each dimension of each operand and result.
        rule_fields: of `Rule`; and `whole`, labels that must not be split.
    """
    whole = rule_fields.pop("whole", frozenset())
    every = [x for labelled in (*ins, *outs) for x in labelled]
    labels = dict.fromkeys(x for x in every if x is not None and x not in whole)
    factors = []
    for label in labels:
        carries = [_carry(labelled, label) for labelled in (*ins, *outs)]
        slots = zip(carries, [*op.ins, *op.outs], strict=True)
        lengths = dict.fromkeys(shape[carry.dim] for carry, shape in slots if carry is not None)
        # Of two lengths it is no loop, but broadcast: [1, k] beside [n, k]. A symbol may be either number.
        if sum(isinstance(n, int) for n in lengths) > 1:
            continue
        letter = label if isinstance(label, str) and len(label) == 1 else ""
        sides = tuple(carries[: len(ins)]), tuple(carries[len(ins) :])
        factors.append(Factor(next(iter(lengths)), *sides, label=letter))
    return Rule(tuple(factors), **rule_fields)


def _carry(labelled: Sequence[Label], label: Label) -> Carry | None:
    return Carry(labelled.index(label)) if label in labelled else None


def masked(labels: Iterable[Label], among: Container[Label]) -> list[Label]:
    """The labels, with None for those that are not among these."""

    def of(label: Label) -> Label:
        return label if label in among else None

    return [of(x) for x in labels]


def dim_labels(n: int, whole: Collection[int]) -> list[Label]:
    """Labels 0 to n - 1 for the dimensions of a tensor, with None for those that stay whole."""
    return masked(range(n), set(range(n)).difference(whole))


def wide_labels(labels: Sequence[Label], shape: Shape) -> list[Label]:
    """The labels of an operand, with None where a dimension has size 1: it is broadcast, and no loop."""
    return masked(labels, {x for x, n in zip(labels, shape, strict=True) if n != 1})


def einsum(op: Op, equation: str, **rule_fields: Any) -> Rule:
    """The rule of an operator written as an einsum string with one term a slot.

    `...` stands for broadcast dimensions, `_` for a dimension that must stay whole.
    """
    left, right = equation.replace(" ", "").split("->")
    ins, outs = _terms(op, left, op.ins), _terms(op, right, op.outs)
    shapes = {x: n for t, s in zip(outs, op.outs, strict=True) for x, n in zip(t, s, strict=True)}
    for term, shape in zip(ins, op.ins, strict=True):
        for i, (label, n) in enumerate(zip(term, shape, strict=True)):
            if n == 1 and shapes.get(label, n) != 1:
                term[i] = None
    return loops(op, ins, outs, **rule_fields)


def _terms(op: Op, text: str, shapes: Sequence[Shape]) -> list[list[Label]]:
    terms = text.split(",") if shapes else []
    if len(terms) != len(shapes):
        raise RuleError(f"the rule of {op.target} has {len(terms)} terms in {text!r} for {len(shapes)} tensors")
    return [_term(op, t, s) for t, s in zip(terms, shapes, strict=True)]


def _term(op: Op, term: str, shape: Shape) -> list[Label]:
    head, dots, tail = term.partition("...")
    between = len(shape) - len(head) - len(tail)
    if between < 0 or (between and not dots):
        raise RuleError(
            f"the rule of {op.target} has the term {term!r} for a tensor of {len(shape)} dimensions, "
            f"{list(map(str, shape))}. Write one letter a dimension, and `...` for any number of them."
        )
    labels = [*head, *range(-between, 0), *tail]
    return masked(labels, set(labels) - {"_"})


def broadcast(op: Op, n: int) -> list[list[Label]]:
    """Labels 0 to n - 1 for the operands' dimensions, aligned at the last one; None where a dimension has size 1."""
    return [wide_labels(range(n - len(s), n), s) for s in op.ins]


def local_count(name: str, slot: int, dim: int) -> Localise:
    """The `localise` of an operator whose argument `name` counts the loop that this dimension carries."""

    def localise(op: Op, local: ShardCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        args = local.arguments(op)
        if local.loop is not None and local.in_partition(slot, dim) is not None:
            args[name] = local.length(local.loop)
        return local.call(op, args)

    return localise


def with_factors(base: Rule, extra: Iterable[Factor]) -> Rule:
    """The rule with more factors."""
    return replace(base, factors=(*base.factors, *extra))
