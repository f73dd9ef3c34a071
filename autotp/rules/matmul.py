"""Contractions: linear, matrix products, also grouped, einsum, attention; and functions of whole matrices."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp import compat
from autotp.ir.layouts import divide
from autotp.ir.op import EXPERTS, Carry, Factor, Op, Rule, aten
from autotp.ir.specs import Runs
from autotp.kernels.attention import dealt_attention

from .core import broadcast, einsum, loops, rule, wide_labels, with_factors

if TYPE_CHECKING:
    from .local import ShardCall


@rule(aten.linear)
def linear(op: Op) -> Rule:
    bias = op.slot("bias") is not None
    equation = "...k,nk,n->...n" if bias else "...k,nk->...n"
    addends = frozenset({2} if bias else ())
    return einsum(op, equation, linear=(addends | {0},), addends=addends)


EITHER = (frozenset({0}), frozenset({1}))


@rule(aten.mm)
def mm(op: Op) -> Rule:
    return einsum(op, "mk,kn->mn", linear=EITHER)


@rule(aten._int_mm.default)
def int_mm(op: Op) -> Rule:
    """Sums of products of bytes are exact in any order; bytes are no summands, for their sum may be no byte."""
    return einsum(op, "mk,kn->mn", empty=False)


@rule(aten._scaled_mm.default)
def scaled_mm(op: Op) -> Rule:
    """Scales are of the whole operand, or of its rows and columns, and not of what is summed over."""
    if op.names[:4] != ["self", "mat2", "scale_a", "scale_b"] or op.slot("scale_result") is not None:
        return Rule()
    (m, k), (_, n) = op.ins[:2]
    if op.ins[2:4] not in ([(m, 1), (1, n)], [(1, 1), (1, 1)], [(), ()], [(1,), (1,)]):
        return Rule()  # blocks
    scales = "m_"[2 - len(op.ins[2]) :], "_n"[2 - len(op.ins[3]) :]
    addends = frozenset({4} if len(op.ins) > 4 else ())
    return einsum(op, ",".join(["mk", "kn", *scales, *"n" * len(addends)]) + "->mn", addends=addends, empty=False)


@rule(aten.bmm)
def bmm(op: Op) -> Rule:
    return einsum(op, "bmk,bkn->bmn", linear=EITHER)


ADDED = {"linear": (frozenset({0, 1}), frozenset({0, 2})), "addends": frozenset({0})}


@rule(aten.addmm)
def addmm(op: Op) -> Rule:
    """`beta` and `alpha` scale the addend and the product; both stay linear."""
    return einsum(op, "mn"[2 - len(op.ins[0]) :] + ",mk,kn->mn", **ADDED)


@rule(aten.baddbmm)
def baddbmm(op: Op) -> Rule:
    return einsum(op, "bmn"[3 - len(op.ins[0]) :] + ",bmk,bkn->bmn", **ADDED)


@rule(aten.addbmm)
def addbmm(op: Op) -> Rule:
    return einsum(op, "mn"[2 - len(op.ins[0]) :] + ",bmk,bkn->mn", **ADDED)


@rule(aten.addmv)
def addmv(op: Op) -> Rule:
    return einsum(op, "m"[1 - len(op.ins[0]) :] + ",mk,k->m", **ADDED, empty=op.ins[0] == op.outs[0])


@rule(aten.matmul)
def matmul(op: Op) -> Rule:
    a, b = (len(s) for s in op.ins)
    left = "k" if a == 1 else "...mk"
    right = "k" if b == 1 else "...kn"
    result = "..." * (a > 2 or b > 2) + "m" * (a > 1) + "n" * (b > 1)
    if not result.startswith("..."):
        left, right = left.replace("...", ""), right.replace("...", "")
    return einsum(op, f"{left},{right}->{result}", linear=EITHER)


@rule(aten.mv)
def mv(op: Op) -> Rule:
    return einsum(op, "mk,k->m", linear=EITHER)


@rule(aten.dot)
def dot(op: Op) -> Rule:
    return einsum(op, "k,k->", linear=EITHER)


@rule(aten.cdist)
def distances(op: Op) -> Rule:
    return einsum(op, "...m_,...n_->...mn", empty=False)


@rule(aten.einsum.default)
def torch_einsum(op: Op) -> Rule:
    equation = op.args["equation"].replace(" ", "")
    if "->" not in equation:
        letters = [c for c in equation if c.isalpha()]
        equation += "->" + "..." * ("..." in equation) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    if any(len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in equation.split("->")[0].split(",")):
        return Rule()  # a repeated letter takes a diagonal
    return einsum(op, equation, linear=tuple(frozenset({i}) for i in range(len(op.ins))))


@rule(aten.inner)
def inner(op: Op) -> Rule:
    a, b = (len(s) for s in op.ins)
    if not a or not b:
        return einsum(op, "...,...->...", linear=EITHER)
    left, right = string.ascii_lowercase[: a - 1], string.ascii_uppercase[: b - 1]
    return einsum(op, f"{left}z,{right}z->{left}{right}", linear=EITHER)


@rule(aten.linalg_vecdot, aten.vdot)
def vecdot(op: Op) -> Rule:
    n = len(op.outs[0]) + 1
    d = op.args.get("dim", -1) % n
    return loops(op, broadcast(op, n), [[x for x in range(n) if x != d]], linear=EITHER)


@rule(aten.bilinear)
def bilinear(op: Op) -> Rule:
    bias = len(op.ins) > 3
    addends = frozenset({3} if bias else ())
    return einsum(op, f"...i,...j,oij{',o' * bias}->...o", addends=addends, empty=False)


@rule(aten.outer)
def outer(op: Op) -> Rule:
    return einsum(op, "m,n->mn", linear=EITHER)


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
    ins = [wide_labels(labels, shape) for labels, shape in zip(ins, op.ins, strict=True)]
    shared = heads and op.ins[1][-3] == op.ins[2][-3] == 1  # one key head for all
    whole = {"q"} if op.args["is_causal"] else set()
    if not shared:
        whole.update(heads)
    # A learnt mask gets no gradient from an empty shard: torch skips the whole backward there.
    base = loops(op, ins, [[*outer, "q", "v"]], whole=whole, empty=len(op.ins) == 3 and compat.ATTENDS_WITHOUT_HEADS)
    return with_factors(base, _head_factor(op) if heads else ())


def dealt(op: Op) -> Rule:
    """Rule of causal attention whose queries are dealt over another axis already."""
    return attention(replace(op, args={"dropout_p": 0.0, "is_causal": True}))


dealt_attention.rule = dealt  # type: ignore[attr-defined]


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
    return [Factor(op.ins[1][-3], tuple(ins), (Carry(len(op.outs[0]) - 3, unit=group),), label="h")]


ALIGNMENT = 16  # bytes: torch's kernel wants rows that start at multiples of it
ROWS = Carry(0, groups=2)


@rule("transformers.grouped_mm_fallback.default", aten._grouped_mm.default)
def grouped_mm(op: Op) -> Rule:
    """`tk,ekn->tn`: columns and rows split within each expert, or experts with the tokens that they got."""
    if [len(s) for s in op.ins] != [2, 3, 1]:
        return Rule()
    experts, k, n = op.ins[1]
    block = ALIGNMENT // op.slots[1].meta["val"].itemsize if op.target is aten._grouped_mm.default else 1
    inner, outer = (Carry(d, unit=block) for d in (1, 2))
    # By expert, a rank reads its own rows alone, so the others may be there, and writes zeros there: also a summand.
    rows = [(None, ROWS), (ROWS, ROWS), (ROWS, None)]
    by_expert = [Factor(experts, (x, Carry(0), None), (y,), label=EXPERTS, copies=2) for x, y in rows]
    within = [
        (divide(k, block), (inner, inner, None), (None,)),
        (divide(n, block), (None, outer, None), (inner,)),
    ]
    linear = (frozenset({0}), frozenset({1}))
    of_columns = [Factor(size, *carries) for size, *carries in within if size is not None]
    return Rule((*by_expert, *of_columns), linear, localise=_local_groups, empty=False)


def _local_groups(op: Op, local: ShardCall):
    experts = local.in_partition(1, 0)
    if experts is None:
        return local.unchanged(op)
    rest = tuple(op.args.values())[len(op.slots) :]
    return local.ranked(own_groups, str(op.target), *local.operands, local.runs(experts), *rest)


def own_groups(
    kernel: str, x: Tensor, weight: Tensor, ends: Tensor, groups: Runs, *rest: Any, rank: int, tp: int
) -> Tensor:
    """The grouped product for the groups that this rank has the weights of; zeros in the rows of the others.

    The rank's rows are brought to the front, for that is where the kernel wants the first group. What it leaves in
    the rows after the last group, and in their gradients, is nobody's promise: masked on both sides.

    Args:
        kernel: the operator's name below `torch.ops`. x: all rows, sorted by group, [rows, k].
        weight: of this rank's groups, [groups here, k, n]. ends: the row after each group's last, [groups].
        groups: how they are dealt. rest: what else the operator takes. rank, tp: this rank, of how many.

    Returns: [rows, n].
    """
    ((start, mine),) = groups.spans(rank, tp)
    before = ends[start - 1] if start else ends.new_zeros(())
    rows = torch.arange(x.shape[0], device=x.device)
    own = (rows < ends[start + mine - 1] - before).unsqueeze(-1)
    front = torch.where(own, x.index_select(0, (rows + before) % x.shape[0]), 0)
    operators: Any = torch.ops
    function = reduce(getattr, kernel.split("."), operators)
    product = function(front, weight, (ends[start : start + mine] - before).to(ends.dtype), *rest)
    return torch.where(own, product, 0).index_select(0, (rows - before) % x.shape[0])


@rule(aten.matrix_exp, aten.linalg_matrix_exp, aten.linalg_inv.default, aten.linalg_inv_ex.default)
@rule(aten.linalg_cholesky.default, aten.linalg_cholesky_ex.default, aten.linalg_qr.default)
@rule(aten.linalg_det.default, aten.linalg_slogdet.default, aten.linalg_householder_product.default)
def matrices(op: Op) -> Rule:
    """Rule of many matrices, each on its own."""
    batch = len(op.ins[0]) - 2
    terms = [f"...{'_' * (len(shape) - batch)}" for shape in (*op.ins, *op.outs)]
    return einsum(op, f"{','.join(terms[: len(op.ins)])}->{','.join(terms[len(op.ins) :])}", empty=False)


@rule(aten.linalg_solve.default)
def solved(op: Op) -> Rule:
    """Rule of many systems: each is on its own, and so is each right side of one; linear in these."""
    if len(op.ins[0]) != len(op.ins[1]):
        return Rule()
    sides = "...__,..._n->..._n" if op.args["left"] else "...__,...n_->...n_"
    return einsum(op, sides, linear=(frozenset({1}),), empty=False)


@rule(aten.tril, aten.triu)
def triangle(op: Op) -> Rule:
    """Rows and columns stay whole; linear."""
    n = len(op.ins[0])
    return loops(op, [list(range(n))], [list(range(n))], whole=frozenset({n - 1, n - 2}), linear=(frozenset({0}),))
