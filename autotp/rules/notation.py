"""Notation of rules: einsum strings with a letter for each loop, as rules are written and docs and errors show them."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch

from autotp.errors import RuleError
from autotp.ir.layouts import Size, divide, simplify
from autotp.ir.op import Carry, Op, Rule, Shape, several

from .core import Label, loops, without

Labels = list[list[Label]]
# A dimension: a letter, or several loops as in `(2 a)`, either perhaps absent; `_`, `1`. Or any number of them.
TOKEN = re.compile(r"(?:[A-Za-z]|\([^)]*\))\??|[_1]|(?:\.\.\.|\*)(?:\[[^]]*\])?")
NAMES = ("dim", "dims", "axis", "dimension", "dim1", "dim2")  # of arguments that say which dimensions are meant


def einsum(op: Op, notation: str, **fields: Any) -> Rule:
    """Read the rule of an operator from an einsum string: a term for each argument that may be a tensor, and result.

    A letter is a loop that may be split; one that the results lack is summed over. `_` is a dimension that must stay
    whole, `1` one of that size, `...` any number of them, which are broadcast, and `*` any number that stay whole.
    Behind either of these, `[x]` says what is at the dimensions that the argument `dim` names, and `[]` that these are
    not there (with `keepdim`: that they stay whole). `(2a)` holds the loop twice over, `(a_)` so often as there is room
    for, `(gi)` two loops, the outer one first; `a?` may be missing. A list of tensors has one term for all, or some
    divided by `;`; so has a side of one term. After `|` stands what holds for a call that does not fit.

    Args:
        op: the call. notation: such as `...k,nk,n->...n`.
        linear: operands that may be partial sums: `self + other` together, `self or other` either; with `other=0` also
            where the number 0 stands for it.
        addends: operands that are added once after the sum (a bias).
        exact: linear only where the result's type has every digit of the operand's.
        sizes: letters whose length is an argument of the call, by its name.
        strict: nothing is broadcast: dimensions of different lengths stay whole.
        fields: of `loops`.

    Raises:
        RuleError: the call has other dimensions.
    """
    rule = attempt(op, notation, **fields)
    if rule is None:
        ins, outs = _terms_of(op, *_forms(notation)[-1])
        pairs = [(t, list(map(str, s))) for t, s in zip([*ins, *outs], [*op.ins, *op.outs], strict=False)]
        faults = [
            f"the term {t!r} for a tensor of {len(s)} dimensions, {s}" for t, s in pairs if not _present(t, len(s))
        ]
        raise RuleError(
            f"the rule of {op.target} has {next(iter(faults), f'{len(outs)} results, and not {len(op.outs)}')}. "
            "Write one letter a dimension, and `...` for any number of them."
        )
    return rule


def attempt(
    op: Op,
    notation: str,
    *,
    linear: str = "",
    addends: str = "",
    exact: bool = False,
    sizes: Mapping[str, str] | None = None,
    strict: bool = False,
    **fields: Any,
) -> Rule | None:
    """Read a rule as `einsum` does; None where the call has other dimensions.

    Args: as for `einsum`.
    """
    labels = fitted(op, notation, strict)
    if labels is None:
        return None
    sums = _sums(op, linear)
    if exact and sums and rounds(op, min(sums[0])):
        sums = ()
    lengths = {letter: op.size(name) for letter, name in (sizes or {}).items()}
    return loops(op, *labels, linear=sums, addends=_slots(op, addends.split()), sizes=lengths, strict=strict, **fields)


def _sums(op: Op, linear: str) -> tuple[frozenset[int], ...]:
    """Return the sets of operands in which a call is linear; none with a number, unless 0 and written as `name=0`."""
    sets: list[frozenset[int]] = []
    for text in linear.split(" or "):
        names = [term.removesuffix("=0") for term in text.split(" + ")]
        numbers = [op.args.get(name) for name in names if name not in op.names]
        if not any(numbers) and ("=0" in text or 0 not in numbers):
            sets.append(_slots(op, names))
    return tuple(slots for slots in sets if slots)


def _slots(op: Op, names: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, name in enumerate(op.names) if name in names)


def rounds(op: Op, slot: int = 0) -> bool:
    """Say whether a cast loses digits: a sum of rounded summands is another number than the rounded sum."""
    source, goal = op.slots[slot].meta["val"].dtype.to_real(), op.node.meta["val"].dtype.to_real()
    if min(source.itemsize, goal.itemsize) == 1 and source.is_floating_point:  # which torch promotes to nothing
        return source != goal and goal.itemsize <= source.itemsize
    return torch.promote_types(source, goal) != goal


def fitted(op: Op, notation: str, strict: bool) -> tuple[Labels, Labels] | None:
    """Label the operands' and the results' dimensions by the first alternative that fits; None where none does."""
    for left, right in _forms(notation):
        ins, outs = _terms_of(op, left, right)
        labels = _labels(op, ins, outs, strict) if len(outs) == len(op.outs) else None
        if labels is not None:
            return labels[: len(ins)], labels[len(ins) :]
    return None


@cache
def _forms(notation: str) -> list[tuple[list[str], list[str]]]:
    """Split a notation into the terms of both sides of each alternative."""
    forms = [form.split("->") for form in notation.replace(" ", "").split("|")]
    return [(left.split(","), right.split(",")) for left, right in forms]


@cache
def _tensor_arguments(target: Any) -> list[str]:
    """List the arguments that may be tensors; none for a function of Python."""
    arguments = target._schema.arguments if hasattr(target, "_schema") else ()
    return [a.name for a in arguments if "Tensor" in str(a.type)]


def _terms_of(op: Op, left: list[str], right: list[str]) -> tuple[list[str], list[str]]:
    """List a term for each operand and result: one for all or that of its argument, which is left out with its term."""
    ins = left * len(op.ins) if len(left) == 1 and ";" not in left[0] else list(_operands(op, left))
    return ins, right if len(right) > 1 else right * len(op.outs)


def _operands(op: Op, terms: list[str]) -> Iterator[str]:
    of = dict(zip(_tensor_arguments(op.target) or dict.fromkeys(op.names), terms, strict=False))
    for name in dict.fromkeys(op.names):
        count, several = op.names.count(name), of[name].split(";")
        yield from several[:count] if len(several) > 1 else several * count


def _labels(op: Op, ins: list[str], outs: list[str], strict: bool) -> Labels | None:
    """Label all dimensions by a term for each tensor, where these fit."""
    shapes = [*op.ins, *op.outs]
    matches = [_present(term, len(shape)) for term, shape in zip([*ins, *outs], shapes, strict=True)]
    if None in matches:
        return None
    terms = [x for x in matches if x is not None]
    axes = named_dims(op)
    count = len(axes or ())
    widths = [free + count * tokens[spread].endswith("[]") for tokens, free, spread in terms[: len(ins)] if spread >= 0]
    width = max(widths, default=max((free for _, free, _ in terms), default=0))
    axes = range(width) if axes is None else axes
    dims = [d % width - width for d in axes if width]
    labels = [_expanded(tokens, free, dims, bool(op.args.get("keepdim"))) for tokens, free, _ in terms]
    dims_of = [list(zip(labelled, shape, strict=True)) for labelled, shape in zip(labels, shapes, strict=True)]
    every = list(chain.from_iterable(dims_of))
    # `...` of a result is as long as the operands': a dimension that none of these has would be no loop of theirs.
    longest = min((x for x, _ in every if isinstance(x, int)), default=0)
    if longest < -width or any(x == 1 and n != 1 for x, n in every):
        return None
    # A dimension of size 1, where the result has another, is broadcast, and no loop.
    wide: set[Label] = set()
    for x, n in chain.from_iterable(dims_of[len(ins) :]):
        wide |= {x} if n != 1 and not strict else set()
    for i, slot in enumerate(dims_of):
        labels[i] = without(labels[i], {1, *(x for x, n in slot if n == 1 and x in wide)})
    return labels


@cache
def _present(term: str, rank: int) -> tuple[list[str], int, int] | None:
    """Match a term to a tensor of this rank: its tokens, the number of dimensions of `...` or `*`, and its index."""
    tokens = TOKEN.findall(term)
    spread = sum(t[0] in ".*" for t in tokens)
    while len(tokens) - spread > rank and any(t.endswith("?") for t in tokens):
        tokens.remove(next(t for t in tokens if t.endswith("?")))
    free = rank - len(tokens) + spread
    place = next((i for i, t in enumerate(tokens) if t[0] in ".*"), -1)
    return (tokens, free, place) if free >= 0 and (spread or not free) else None


def _expanded(tokens: list[str], free: int, dims: Sequence[int], keepdim: bool) -> list[Label]:
    """Label a tensor's dimensions: those of `...` by numbers, from the last one back."""
    labels: list[Label] = []
    for token in tokens:
        if token[0] not in ".*":
            labels.append(_label(token))
            continue
        spread, bracket, at = token.removesuffix("]").partition("[")
        absent = bracket and not at and not keepdim
        for d in range(-free - len(dims) * bool(absent), 0):
            if not bracket or d not in dims:
                labels.append(d if spread == "..." else None)
            elif not absent:
                labels.append(_label(at or "_"))
    return labels


@cache
def _label(token: str) -> Label:
    token = token.removesuffix("?")
    if token[0] == "(":
        return tuple(map(_label, token[1:-1]))
    return int(token) if token.isdigit() else token.replace("_", "") or None


def named_dims(op: Op) -> list[int] | None:
    """Return the dimensions that the arguments of a call name, as given; None for all."""
    dims: list[Any] = []
    for value in [op.args[name] for name in NAMES if name in op.args]:
        dims += several(value)
    return None if not dims or None in dims else dims


BELOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def letters(rule: Rule) -> list[str]:
    """Return a letter for each factor: that of its label, or the next one that is free."""
    labels = [f.label[:1] for f in rule.factors]
    free = iter(x for x in string.ascii_letters if x not in labels)
    return [x or next(free) for x in labels]


def notation(op: Op, rule: Rule) -> str:
    """Write the factors of a call, such as `abk,nk,n->abn`: a letter that the right side lacks is contracted.

    `_` stays whole; `(2 a)` holds the loop twice over, `(a 2)` in pairs, `(a b)` both, the outer one first; `a₀` and
    `a₁` are pieces of one loop that is cut up; `{a}` holds the rows of every group, sorted by group.
    """
    ins = [f.ins for f in rule.factors]
    outs = [f.outs for f in rule.factors]
    return f"{_terms(rule, ins, op.ins)}->{_terms(rule, outs, op.outs)}"


def linear(op: Op, rule: Rule) -> str:
    """Write the operands that may be partial sums: `self + other` together, `self or other` either."""
    names = (dict.fromkeys(map(op.names.__getitem__, sorted(slots))) for slots in rule.linear)
    return " or ".join(dict.fromkeys(map(" + ".join, names)))


def _terms(rule: Rule, sides: Sequence[Sequence[Carry | None]], shapes: Sequence[Shape]) -> str:
    """Write a term for each tensor of one side, of which every factor of the rule has its carries."""
    columns = list(zip(*sides, strict=True)) or [()] * len(shapes)
    return ",".join(_term(rule, *slot) for slot in zip(columns, shapes, strict=True))


def _term(rule: Rule, carries: Sequence[Carry | None], shape: Shape) -> str:
    loops = list(zip(letters(rule), rule.factors, carries, strict=True))
    return "".join(
        _dim([(name, f.size, c) for name, f, c in loops if c is not None and c.dim == dim], length)
        for dim, length in enumerate(shape)
    )


def _dim(loops: list[tuple[str, Size, Carry]], length: Size) -> str:
    """Write the loops that one dimension holds, the outermost first, with numbers for the factors between them."""
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
