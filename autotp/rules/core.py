"""Definition of an operator rule: the operator's factors (independent loops), said per operand slot and per result.

Splitting a factor over the ranks means: operands that carry it are sharded there, operands that lack it are
replicated, results that carry it are sharded, results that lack it (the factor is contracted) are partial. Rules never
mention ranks or layouts; strategies are made from them in `autotp.passes.shard.strategies`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from autotp.compat import OpOverloadPacket
from autotp.errors import RuleError
from autotp.ir.layouts import Size, divide, simplify
from autotp.ir.op import Carry, Factor, Op, Rule, Shape, several

RuleFunction = Callable[[Op], Rule]
RULES: dict[Any, RuleFunction] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Enter a rule function in the table for these operators (overloads, or packets for all their overloads)."""

    def enter(function: RuleFunction) -> RuleFunction:
        for target in targets:
            RULES.update(dict.fromkeys(overloads(target), function))
        return function

    return enter


def targets_of(operators: str) -> list[Any]:
    """List the overloads of operators by name: within `torch.ops.aten`, or with their namespace."""
    targets: list[Any] = []
    for name in operators.split():
        space, _, path = name.rpartition("::")
        targets += overloads(reduce(getattr, path.split("."), getattr(torch.ops, space or "aten")))
    return targets


def overloads(target: Any) -> list[Any]:
    """List an overload itself; of a packet those overloads that do not write to their operands."""
    if not isinstance(target, OpOverloadPacket):
        return [target]
    members = [getattr(target, name) for name in target.overloads()]
    return [overload for overload in members if not overload._schema.is_mutable]


def rule_of(op: Op) -> Rule | None:
    """Return the rule of this call, or None where the operator has none (it then runs whole)."""
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
    contracts = any(f.contracts for f in rule.factors)
    addends = rule.addends if contracts else frozenset[int]()
    return replace(rule, linear=tuple(s for s in rule.linear if _summable(op, s)), addends=addends)


def function_of(target: Any) -> RuleFunction | None:
    """Look up the rule function of an operator: its entry in the table, the attribute `rule` of a function of ours, or
    that of all which torch tags as pointwise."""
    function = RULES.get(target) or RULES.get(str(target)) or getattr(target, "rule", None)
    return RULES["pointwise"] if function is None and _pointwise(target) else function


def _summable(op: Op, slots: Iterable[int]) -> bool:
    """Say whether these operands can be sums over the ranks, and the results with them: truth values cannot."""
    results = several(op.node.meta.get("val"))
    values = [op.slots[s].meta["val"] for s in slots]
    return not any(isinstance(v, torch.Tensor) and v.dtype == torch.bool for v in (*values, *results))


def _pointwise(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or schema is None or schema.is_mutable:
        return False
    return "generator" not in str(schema) and all(str(r.type) == "Tensor" for r in schema.returns)


Label = Any


def loops(
    op: Op,
    ins: Sequence[Sequence[Label]],
    outs: Sequence[Sequence[Label]],
    *,
    whole: Container[Label] = (),
    sizes: Mapping[Label, Size] | None = None,
    strict: bool = False,
    last: Label = None,
    factor_fields: Mapping[str, Any] | None = None,
    **rule_fields: Any,
) -> Rule:
    """Make the rule of an operator whose slots' dimensions are labelled: equal labels are one loop, None is no loop.

    A label that no result carries is contracted. A tuple is a dimension that holds several loops, the outermost first:
    labels, numbers, and None for what is no loop; of these the length of one may be unknown.

    Args:
        op: the call. ins, outs: a label for each dimension of each operand and result.
        whole: labels that must not be split. sizes: of labels that no dimension has alone.
        strict: dimensions of different lengths are no loop, even where one may be a symbol for the other.
        last: label of the loop that comes last: plans give a loop by its number, and of equal costs the first wins.
        factor_fields: of every `Factor`. rule_fields: of `Rule`.
    """
    slots = list(zip([*ins, *outs], [*op.ins, *op.outs], strict=True))
    dims = [(x, n) for labelled, shape in slots for x, n in zip(labelled, shape, strict=True) if x is not None]
    alone: dict[Label, dict[Size, None]] = defaultdict(dict)
    for x, n in dims:
        if not isinstance(x, tuple):
            alone[x][n] = None
    lengths: dict[Label, Any] = dict(sizes or {}) | {x: next(iter(several)) for x, several in alone.items()}
    # Of two lengths it is no loop, but broadcast: [1, k] beside [n, k]. A symbol may be either number.
    types = {x: list(map(type, several)) for x, several in alone.items()}
    no_loop = {x for x, kinds in types.items() if kinds.count(int) > 1 or strict and len(kinds) > 1}
    labels: dict[Label, None] = {}
    for x, n in dims:
        if not isinstance(x, tuple):
            labels[x] = None
        else:
            parts = _parts(x, n, lengths)
            letters = {label: size for label, size in zip(x, parts, strict=True) if isinstance(label, str)}
            lengths |= letters
            labels |= dict.fromkeys(letters)
            no_loop |= {label for label, size in letters.items() if size == 1 or None in parts}
    places = [_carries(labelled, shape, lengths) for labelled, shape in slots]
    factors = []
    for label in sorted(labels, key=lambda x: x == last):
        if label in no_loop or label in whole:
            continue
        carries = [place.get(label) for place in places]
        sides = tuple(carries[: len(ins)]), tuple(carries[len(ins) :])
        letter = label if isinstance(label, str) and len(label) == 1 else ""
        factors.append(Factor(lengths[label], *sides, label=letter, **(factor_fields or {})))
    return Rule(tuple(factors), **rule_fields)


def _parts(label: tuple[Label, ...], length: Size, lengths: Mapping[Label, Size]) -> list[Size | None]:
    """Return the lengths of the loops that one dimension holds, of which one is inferred; None where it cannot be."""
    parts: list[Size | None] = []
    for x in label:
        parts.append(x if isinstance(x, int) else lengths.get(x))
    if parts.count(None) == 1:
        parts[parts.index(None)] = divide(length, product(n for n in parts if n is not None))
    return parts


def without(labels: Iterable[Label], whole: Container[Label]) -> list[Label]:
    """Return the labels, with None in place of those that stay whole."""

    def of(label: Label) -> Label:
        return None if label in whole else label

    return [of(x) for x in labels]


def product(sizes: Iterable[Size]) -> Size:
    """Multiply sizes and simplify the product."""
    return reduce(lambda a, b: simplify(a * b), sizes, 1)


def _carries(labelled: Sequence[Label], shape: Shape, lengths: Mapping[Label, Size]) -> dict[Label, Carry]:
    """Return the place of each loop in the dimensions of one slot."""
    places: dict[Label, Carry] = {}
    for d, x in enumerate(labelled):
        if not isinstance(x, tuple):
            places.setdefault(x, Carry(d))
            continue
        parts: list[Any] = _parts(x, shape[d], lengths)
        if None not in parts:
            places |= {label: Carry(d, product(parts[:i]), product(parts[i + 1 :])) for i, label in enumerate(x)}
    return places


def with_factors(base: Rule, extra: Iterable[Factor]) -> Rule:
    """Add factors to a rule."""
    return replace(base, factors=(*base.factors, *extra))
