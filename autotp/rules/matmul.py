"""Contractions: linear, matrix products, einsum, attention."""

from __future__ import annotations

from autotp.layouts import divide

from .core import Carry, Factor, Op, Rule, aten, einsum, loops, rule, with_factors


@rule(aten.linear)
def linear(op: Op) -> Rule:
    bias = op.slot("bias") is not None
    equation = "...k,nk,n->...n" if bias else "...k,nk->...n"
    return einsum(op, equation, linear=(frozenset({0, 2} if bias else {0}),), addends=frozenset({2} if bias else ()))


@rule(aten.mm)
def mm(op: Op) -> Rule:
    return einsum(op, "mk,kn->mn", linear=(frozenset({0}), frozenset({1})))


@rule(aten.bmm)
def bmm(op: Op) -> Rule:
    return einsum(op, "bmk,bkn->bmn", linear=(frozenset({0}), frozenset({1})))


@rule(aten.addmm)
def addmm(op: Op) -> Rule:
    """`beta` and `alpha` scale the addend and the product; both stay linear."""
    return einsum(op, "mn"[2 - len(op.ins[0]) :] + ",mk,kn->mn", addends=frozenset({0}))


@rule(aten.baddbmm)
def baddbmm(op: Op) -> Rule:
    return einsum(op, "bmn"[3 - len(op.ins[0]) :] + ",bmk,bkn->bmn", addends=frozenset({0}))


@rule(aten.matmul)
def matmul(op: Op) -> Rule:
    a, b = (len(s) for s in op.ins)
    left, right = "k" if a == 1 else "...mk", "k" if b == 1 else "...kn"
    result = "..." * (a > 2 or b > 2) + "m" * (a > 1) + "n" * (b > 1)
    if not result.startswith("..."):
        left, right = left.replace("...", ""), right.replace("...", "")
    return einsum(op, f"{left},{right}->{result}", linear=(frozenset({0}), frozenset({1})))


@rule(aten.mv)
def mv(op: Op) -> Rule:
    return einsum(op, "mk,k->m")


@rule(aten.dot)
def dot(op: Op) -> Rule:
    return einsum(op, "k,k->")


@rule(aten.einsum.default)
def torch_einsum(op: Op) -> Rule:
    equation = op.args["equation"].replace(" ", "")
    if "->" not in equation:
        letters = [c for c in equation if c.isalpha()]
        equation += "->" + "..." * ("..." in equation) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    if any(len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in equation.split("->")[0].split(",")):
        return Rule()  # a repeated letter takes a diagonal
    return einsum(op, equation, linear=tuple(frozenset({i}) for i in range(len(op.ins))))


@rule(aten.outer)
def outer(op: Op) -> Rule:
    return einsum(op, "m,n->mn", linear=(frozenset({0}), frozenset({1})))


@rule(aten.scaled_dot_product_attention.default)
def attention(op: Op) -> Rule:
    """softmax(q kᵀ) v: batch, heads, query positions (unless causal by index) and value width split, keys do not."""
    if op.args["dropout_p"] > 0:
        return Rule()
    heads = ["h"] if len(op.ins[0]) > 3 else []
    batch = [f"b{i}" for i in range(len(op.ins[0]) - len(heads) - 2)]
    outer = [*batch, *heads]
    query = [*outer, "q", None]
    masks = [query[len(query) - len(s) :] for s in op.ins[3:]]
    ins = [query, [*outer, None, None], [*outer, None, "v"], *masks]
    ins = [[x if n != 1 else None for x, n in zip(t, s, strict=True)] for t, s in zip(ins, op.ins, strict=True)]
    shared = heads and op.ins[1][-3] == op.ins[2][-3] == 1  # one key head for all
    whole = {*(() if shared else heads), *("q" if op.args["is_causal"] else "")}
    # A learnt mask gets no gradient from an empty shard: torch skips the whole backward there.
    base = loops(op, ins, [[*outer, "q", "v"]], whole=whole, empty=len(op.ins) == 3)
    return with_factors(base, _head_factor(op) if heads else ())


def _head_factor(op: Op) -> list[Factor]:
    """Key heads, each with its group of query heads (Ainslie et al. 2023)."""
    group = divide(op.ins[0][-3], op.ins[1][-3])
    if group is None:
        return []
    units = [group, 1, 1, group][: len(op.ins)]
    ins = [
        Carry(len(s) - 3, unit=u) if len(s) > 2 and (s[-3] != 1 or i < 3) else None
        for i, (s, u) in enumerate(zip(op.ins, units, strict=True))
    ]
    return [Factor(op.ins[1][-3], tuple(ins), (Carry(len(op.outs[0]) - 3, unit=group),))]
