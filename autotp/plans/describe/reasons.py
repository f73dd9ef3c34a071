"""Reasons of a parameter's layout, from the operator rules: its role, or the operator that kept it whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from torch import fx

from autotp.ir.graph import draws, resolve, short_name, tensors
from autotp.ir.op import EXPERTS
from autotp.ir.program import Planned
from autotp.passes.canonicalise.functionalise import mutates
from autotp.passes.shard.strategies import Candidates

ELEMENTWISE = "elementwise"
CHEAPER = "whole is cheaper, and within the 3% of the rank's parameters that may stay whole"

STOPPED = (
    "the search for a plan ended after {after:.3g} CPU s (seconds=): the least step is at most {over:.2g}% above "
    "the bound that is proved, and of the plans near it one may send less; give more seconds to look further"
)


def stopped(planned: Planned) -> list[str]:
    """Return the note of a search that its budget ended, with the bound that it had proved; none of a complete one."""
    solution = planned.solution
    if solution is None or solution.stopped_after is None:
        return []
    over = solution.least_seconds / solution.bound - 1 if solution.bound > 0 else math.inf
    return [STOPPED.format(after=solution.stopped_after, over=100 * max(over, 0.0))]


def without_rule(planned: Planned) -> list[str]:
    """Return a note of the operators that make tensors of tensors and run whole because they have no rule."""
    counts = Counter()
    for node, op in planned.ops.items():
        whole = planned.tp > 1 and planned.rules[node] is None and op.slots and tensors(node)
        if whole and not mutates(node) and not draws(node):
            counts[short_name(node.target)] += 1
    names = []
    for name, times in counts.items():
        names.append(f"{name} ({times} times)" if times > 1 else name)
    whole = f"operators without a rule run whole: {', '.join(names)} (autotp.register_rule gives one a rule)"
    return [whole] if counts else []


def role(planned: Planned, node: fx.Node, dim: int) -> str:
    """Name a split of dimension `dim` of this parameter in the field's words, by what its readers do with it."""
    roles = dict.fromkeys(_role(planned, user, slot, dim) for user, slot in _users(planned, node))
    return ", ".join(x for x in roles if x not in ("", ELEMENTWISE)) or ELEMENTWISE


def _role(planned: Planned, user: fx.Node, slot: int, dim: int) -> str:
    """Return the role of a split of dimension `dim` of this operand for one reader; empty where that splits another."""
    factor, rule, op = planned.split(user), planned.rules[user], planned.ops[user]
    carry = factor.ins[slot] if factor is not None else None
    if factor is None or rule is None or carry is None or carry.dim != dim:
        return ""
    if factor.label == EXPERTS:
        return "expert-parallel"
    # A view or a cast says nothing by itself: the role is that of who reads it.
    if len(op.slots) == 1 and factor.outs[0] is not None:
        return role(planned, user, factor.outs[0].dim)
    if factor.reduction != "sum":
        return ""  # measured there, not computed with
    if factor.contracts:
        # A table is looked up, not multiplied: nothing but the weight carries the vocabulary.
        operands = sum(c is not None for c in factor.ins)
        return "row-parallel" if operands > 1 else "vocabulary-parallel"
    others = [c for c, s, n in zip(factor.ins, op.slots, op.ins, strict=True) if n and not _weight(planned, s)]
    if any(f.contracts for f in rule.factors):
        # A batched product [experts, in, out]: the activations carry the loop too.
        return "expert-parallel" if any(others) else "column-parallel"
    return "column-parallel" if others and not any(others) else ELEMENTWISE


def reason(planned: Planned, node: fx.Node, candidates: Candidates, pinned: bool) -> str:
    """Return the reason why this parameter is whole: the operator that keeps it so, and the cause.

    Args:
        planned: the graph with its decisions.
        node: the parameter.
        candidates: the partitions that each dimension may have.
        pinned: whether a pin says so.
    """
    users = list(_users(planned, node))
    if planned.tp == 1:
        return "there is one rank"
    if pinned or not users:
        return "pinned by the user" if pinned else "nothing reads it"
    # One reader that can split no dimension keeps it whole whatever the others can.
    limits = [(*_limit(planned, u, slot), u, slot) for u, slot in users]
    blamed = next((cause for dims, cause, *_ in limits if not dims), None)
    if blamed is not None:
        return blamed
    # Each can split some: a split must be along one that all of them can.
    dims = set.intersection(*(dims for dims, *_ in limits))
    names = " and ".join(dict.fromkeys(short_name(u.target) for _, _, u, _ in limits))
    if not dims:
        return f"{names} cannot split the same dimension of it"
    # The solver had a choice where some partition of it fits the operands beside; otherwise that is the reason.
    possible = sorted(d for d in dims if candidates.of.get(((planned.same[node], 0), d)))
    if not possible:
        return f"{names} could split dim {min(dims)}, but no partition over {planned.tp} ranks fits the other operands"
    (_, _, user, slot), dim = limits[0], possible[0]
    return f"{short_name(user.target)} could split dim {dim}, but {_instead(planned, user, slot)}; {CHEAPER}"


def _instead(planned: Planned, user: fx.Node, slot: int) -> str:
    """Describe the way an operator runs in place of splitting this operand."""
    factor = planned.split(user)
    if factor is None:
        return "runs whole"
    if factor.ins[slot] is not None:
        return "takes its slice from the whole"
    out = next((c for c in factor.outs if c is not None), None)
    return "is split over the summed dimension" if out is None else f"is split over dim {out.dim} of its result"


def _limit(planned: Planned, user: fx.Node, slot: int) -> tuple[set[int], str]:
    """Return the dimensions of an operand that an operator (or all readers of a view) can split, and why no others."""
    op, rule, name = planned.ops[user], planned.rules[user], short_name(user.target)
    if rule is None:
        return set(), f"{name} has no rule, so it runs whole"
    carried = {}
    for f in rule.factors:
        carry = f.ins[slot]
        # A loop that results lack and that may not be split is as good as none.
        if carry is not None and (f.contracted or not f.contracts):
            carried[carry.dim] = f.outs[0]
    if not carried:
        return set(), f"{name} {_whole(planned, user)}"
    # A product decides by itself what it can split; a view or a cast, of one operand, only as far as its readers can.
    if len(op.slots) > 1:
        return set(carried), ""
    # A transposed weight is split where the product behind the transpose splits it, so its readers are asked.
    readers = [_limit(planned, reader, at) for reader, at in _users(planned, user)]
    blamed = next((cause for dims, cause in readers if not dims), "")
    dims = set()
    for d, out in carried.items():
        if out is None or all(out.dim in can for can, _ in readers):
            dims.add(d)
    return dims, blamed or f"{name} leads to operators that cannot split the same dimension"


def _whole(planned: Planned, user: fx.Node) -> str:
    """Name the dimension that the operator works along as a whole, where its rule says so."""
    op, rule = planned.ops[user], planned.rules[user]
    assert rule is not None
    if not rule.factors:
        return "runs whole: its rule allows no split of this call"
    for slot, shape in enumerate(op.ins):
        carried = {c.dim for f in rule.factors if (c := f.ins[slot]) is not None}
        missing = [d for d in range(len(shape)) if d not in carried and shape[d] != 1]
        if missing and carried:
            return f"works along the whole of dim {', '.join(map(str, missing))} of its input"
    return "can split no dimension of it"


def _users(planned: Planned, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield the operators that read a value, with the operand slot."""
    for user in node.users:
        if user in planned.ops:
            yield from ((user, i) for i, s in enumerate(planned.ops[user].slots) if s is node)
        elif resolve(user)[0] is node:
            yield from _users(planned, user)


def _weight(planned: Planned, node: fx.Node) -> bool:
    """Return whether a value is a parameter, seen through views and casts."""
    node = resolve(node)[0]
    if node.op == "placeholder":
        return node in planned.trained
    slots = planned.ops[node].slots if node in planned.ops else []
    return len(slots) == 1 and _weight(planned, slots[0])
