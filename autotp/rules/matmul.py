"""Contractions: linear, matrix products, einsum, attention, convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.layouts import divide

from .core import Carry, Factor, Op, Rule, aten, einsum, loops, rule, with_factors

if TYPE_CHECKING:
    from autotp.localise import Local


@rule(aten.linear)
def linear(op: Op) -> Rule:
    bias = ",n" if op.slot("bias") is not None else ""
    equation = f"...k,nk{bias}->...n" if len(op.ins[1]) == 2 else f"...k,k{bias.replace('n', '')}->..."
    return einsum(
        op, equation, linear=(frozenset({0, *range(2, len(op.ins))}),), addends=frozenset({2} if bias else ())
    )


@rule(aten.mm)
def mm(op: Op) -> Rule:
    return einsum(op, "mk,kn->mn", linear=(frozenset({0}), frozenset({1})))


@rule(aten.bmm)
def bmm(op: Op) -> Rule:
    return einsum(op, "bmk,bkn->bmn", linear=(frozenset({0}), frozenset({1})))


@rule(aten.addmm)
def addmm(op: Op) -> Rule:
    """`beta` and `alpha` scale the addend and the product; both stay linear."""
    return einsum(
        op, "...,mk,kn->...".replace("...", "mn"[2 - len(op.ins[0]) :], 1).replace("...", "mn"), addends=frozenset({0})
    )


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


@rule(aten.scaled_dot_product_attention.default)
def attention(op: Op) -> Rule:
    """softmax(q kᵀ) v: heads, batch, query positions (unless causal by index) and value width split; keys stay whole."""
    if op.args["dropout_p"] > 0:
        return Rule()
    shapes = op.ins
    heads, rank = [s[-3] if len(s) > 3 else 1 for s in shapes[:3]], len(shapes[0])
    if rank < 4:
        ins, out = (
            [[*range(rank - 2), "q", None], [*range(rank - 2), None, None], [*range(rank - 2), None, "v"]],
            [*range(rank - 2), "q", "v"],
        )
        groups: list[Factor] = []
    else:
        batch = list(range(rank - 3))
        ins = [[*batch, None, "q", None], [*batch, None, None, None], [*batch, None, None, "v"]]
        out = [*batch, None, "q", "v"]
        groups = _head_factor(op, heads)
    if len(shapes) == 4:
        mask, full = shapes[3], op.outs[0]
        labels = out[: len(full) - 1] + [None]
        ins.append([x if mask[i] != 1 else None for i, x in enumerate(labels[len(labels) - len(mask) :])])
    whole = frozenset({"q"} if op.args["is_causal"] else ())
    ins = [
        [None if x is not None and n == 1 and x != "v" else x for x, n in zip(t, s, strict=True)]
        for t, s in zip(ins, shapes, strict=True)
    ]
    return with_factors(loops(op, ins, [out], whole=whole), groups)


def _head_factor(op: Op, heads: list) -> list[Factor]:
    q, k, _ = heads
    group = divide(q, k)
    if group is None:
        return []
    dims = [len(s) - 3 for s in op.ins]
    ins = [Carry(dims[0], unit=group), Carry(dims[1]), Carry(dims[2])]
    if len(op.ins) == 4:
        mask = op.ins[3]
        ins.append(Carry(dims[3], unit=group) if len(mask) > 2 and mask[-3] != 1 else None)
    return [Factor(k, tuple(ins), (Carry(dims[0], unit=group),))]


@rule(aten.conv1d, aten.conv2d, aten.conv3d)
def convolution(op: Op) -> Rule:
    """Channels are contracted where there are no groups; with groups, whole groups split. Positions stay whole."""
    if len(op.ins[0]) != len(op.ins[1]) or not isinstance(op.args.get("padding", 0), list | tuple | int):
        return Rule()
    space = [None] * (len(op.ins[0]) - 2)
    bias = [["o"]] if len(op.ins) == 3 else []
    addends = frozenset({2} if bias else ())
    if op.args["groups"] == 1:
        return loops(op, [["b", "i", *space], ["o", "i", *space], *bias], [["b", "o", *space]], addends=addends)
    g = op.args["groups"]
    wide, per = divide(op.ins[0][1], g), divide(op.ins[1][0], g)
    assert wide is not None and per is not None
    ins = [Carry(1, unit=wide), Carry(0, unit=per), *([Carry(0, unit=per)] if bias else [])]
    batch = loops(op, [["b", None, *space], [None] * len(op.ins[1]), *[[None] for _ in bias]], [["b", None, *space]])
    return Rule((*batch.factors, Factor(g, tuple(ins), (Carry(1, unit=per),))), addends=addends, localise=_local_groups)


def _local_groups(op: Op, local: Local):
    args = local.named(op)
    if local.loop is not None and local.in_partition(1, 0) is not None:
        args["groups"] = local.length(local.loop)
    return local.call(op, args)
