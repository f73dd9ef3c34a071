"""A rule in words: an einsum string with one letter for each loop, as the docs and the errors show it."""

from __future__ import annotations

import string
from collections.abc import Sequence

from autotp.ir.layouts import Size, divide, simplify
from autotp.ir.op import Carry, Op, Rule, Shape

BELOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def letters(rule: Rule) -> list[str]:
    """A letter for each factor: that of its label, or the next one that is free."""
    labels = [f.label[:1] for f in rule.factors]
    free = iter(x for x in string.ascii_letters if x not in labels)
    return [x or next(free) for x in labels]


def notation(op: Op, rule: Rule) -> str:
    """The factors of a call, such as `abk,nk,n->abn`: a letter that the right side lacks is contracted.

    `_` stays whole; `(2 a)` holds the loop twice over, `(a 2)` in pairs, `(a b)` both, the outer one first; `a₀` and
    `a₁` are pieces of one loop that is cut up; `{a}` holds the rows of every group, sorted by group.
    """
    ins = [f.ins for f in rule.factors]
    outs = [f.outs for f in rule.factors]
    return f"{_terms(rule, ins, op.ins)}->{_terms(rule, outs, op.outs)}"


def linear(op: Op, rule: Rule) -> str:
    """The operands that may be partial sums: `self + other` together, `self or other` either."""
    sums = []
    for slots in rule.linear:
        names = [op.names[i] for i in sorted(slots)]
        sums.append(" + ".join(dict.fromkeys(names)))
    return " or ".join(dict.fromkeys(sums))


def _terms(rule: Rule, sides: Sequence[Sequence[Carry | None]], shapes: Sequence[Shape]) -> str:
    """A term for each tensor of one side, of which every factor of the rule has its carries."""
    terms = []
    for i, shape in enumerate(shapes):
        carries = [side[i] for side in sides]
        terms.append(_term(rule, carries, shape))
    return ",".join(terms)


def _term(rule: Rule, carries: Sequence[Carry | None], shape: Shape) -> str:
    loops = list(zip(letters(rule), rule.factors, carries, strict=True))
    return "".join(
        _dim([(name, f.size, c) for name, f, c in loops if c is not None and c.dim == dim], length)
        for dim, length in enumerate(shape)
    )


def _dim(loops: list[tuple[str, Size, Carry]], length: Size) -> str:
    """The loops that one dimension holds, the outermost first, with numbers for what lies between them."""
    roles: dict[str, tuple[str, Size, Carry]] = {}
    for loop in loops:
        roles.setdefault(loop[0], loop)  # one loop may have several: the first counts
    loops = list(roles.values())
    if len(loops) > 1:
        loops = [x for x in loops if x[1] != 1] or loops[:1]
    if len(loops) == 1 and loops[0][2].piece is not None:
        return loops[0][0] + str(loops[0][2].piece).translate(BELOW)
    if len(loops) == 1 and loops[0][2].groups is not None:
        return "{" + loops[0][0] + "}"
    parts: list[str] = []
    outside: Size = 1
    for name, size, carry in sorted(loops, key=lambda x: str(x[2].repeat).zfill(20)):
        gap = divide(carry.repeat, outside)
        if gap is None:
            return "|".join(x[0] for x in loops)  # either, not both
        parts += [str(gap)] * (gap != 1) + [name]
        outside = simplify(carry.repeat * size)
    inside = divide(length, outside)
    parts += [str(inside)] * (inside not in (1, None)) if loops else ["_"]
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"
