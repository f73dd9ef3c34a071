"""Pointwise operators: every result dimension is a loop; operands broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autotp.ir.op import Op, Rule, aten

from .core import einsum, loops, rule

if TYPE_CHECKING:
    from .local import ShardCall

LINEAR_IN_FIRST = {
    aten.neg, aten.negative, aten.to, aten._to_copy, aten.contiguous, aten.clone, aten.alias, aten.detach,
    aten.lift_fresh_copy, aten.real, aten.imag, aten.conj, aten._conj, aten.conj_physical, aten._conj_physical,
    aten.resolve_conj, aten.resolve_neg,
}  # fmt: skip
TOGETHER = {aten.add, aten.sub, aten.rsub, aten.subtract, aten.complex}  # linear in both operands at once
PRODUCT = {aten.mul, aten.multiply}  # linear in either operand
QUOTIENT = {aten.div, aten.divide, aten.true_divide}  # linear in the numerator


def _linear(op: Op) -> tuple[frozenset[int], ...]:
    # Summands may stay summands only where f(a + b) = f(a) + f(b) for certain: a constant that is added would be added
    # once a rank, and what is chosen by a mask must have zero, or a further summand, in the other places.
    packet = op.target.overloadpacket
    if packet in LINEAR_IN_FIRST or (packet in QUOTIENT and op.args.get("rounding_mode") is None):
        return (frozenset({0}),) if op.slot("self") == 0 and not _rounds(op) else ()
    if packet in TOGETHER and len(op.slots) == 2:
        return (frozenset({0, 1}),)
    if packet in PRODUCT:
        return tuple(frozenset({i}) for i in range(len(op.slots)))
    if packet is aten.where and op.names == ["condition", "self", "other"]:
        return (frozenset({1, 2}),)
    if packet is aten.where and len(op.slots) == 2 and op.args["other" if op.names[1] == "self" else "self"] == 0:
        return (frozenset({1}),)
    if packet is aten.masked_fill and op.args["value"] == 0:
        return (frozenset({0}),)
    return ()


def _rounds(op: Op, slot: int = 0) -> bool:
    """Say whether a cast loses digits: a sum of rounded summands is another number than the rounded sum."""
    source, goal = op.slots[slot].meta["val"].dtype.to_real(), op.node.meta["val"].dtype.to_real()
    if min(source.itemsize, goal.itemsize) == 1 and source.is_floating_point:  # which torch promotes to nothing
        return source != goal and goal.itemsize <= source.itemsize
    return torch.promote_types(source, goal) != goal


@rule("pointwise", aten.contiguous, aten.clone, aten.alias, aten.detach, aten.detach_.default, aten._to_copy)
@rule(aten.to.dtype, aten.to.dtype_layout, aten.to.device)
def pointwise(op: Op) -> Rule:
    terms = ",".join("..." for _ in op.ins)
    results = ",".join("..." for _ in op.outs)
    return einsum(op, f"{terms}->{results}", linear=_linear(op))


@rule(aten.lift_fresh_copy, aten.lift_fresh, aten.masked_fill, aten.hardswish)
@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.log_sigmoid, aten.rsub)
@rule(aten.real, aten.imag, aten.complex, aten.polar, aten.conj, aten._conj, aten._conj_physical, aten.resolve_conj)
@rule(aten.__and__, aten.__or__, aten.__xor__, aten.relu6, aten.selu, aten.square, aten.float_power, aten.true_divide)
@rule(aten.softplus, aten.mish, aten.clip, aten.ldexp, aten.fill, aten.floor_divide, aten.leaky_relu.default)
@rule(aten.resolve_neg, aten.multiply, aten.divide, aten.subtract, aten.negative, aten.absolute, aten.isclose)
@rule(aten.greater, aten.greater_equal, aten.less, aten.less_equal, aten.not_equal, aten.fix, aten.special_expit)
@rule(aten.isreal, aten.arccos, aten.arcsin, aten.arctan, aten.arccosh, aten.arcsinh, aten.arctanh, aten.arctan2)
def untagged(op: Op) -> Rule:
    """Pointwise too, though torch does not tag them all."""
    return pointwise(op)


@rule(aten.to.other, aten.type_as)
def like(op: Op) -> Rule:
    """A cast to the type of an example, whose shape does not matter."""
    labels = list(range(len(op.ins[0])))
    return loops(op, [labels, [None] * len(op.ins[1])], [labels], linear=() if _rounds(op) else (frozenset({0}),))


@rule(aten.copy.default)
def copy(op: Op) -> Rule:
    """The second operand, broadcast and cast like the first; torch's own operator has no derivative."""
    linear = () if _rounds(op, 1) else (frozenset({1}),)
    return einsum(op, "...,...->...", linear=linear, localise=_local_copy)


def _local_copy(op: Op, local: ShardCall):
    cast = local.emit(aten.to.dtype, (local.operand(1), op.node.meta["val"].dtype))
    return aten.expand_as.default, (cast, local.operand(0)), {}


@rule(aten.prelu)
def prelu(op: Op) -> Rule:
    return einsum(op, "...,...->..." if op.ins[1] in ((), (1,)) else "bc...,c->bc...")


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def bucketize(op: Op) -> Rule:
    return einsum(op, "...,_->...")


@rule(aten.searchsorted.Tensor)
def searchsorted(op: Op) -> Rule:
    """Each number is looked for on its own, where all look in the same row."""
    return einsum(op, "_,...->...") if len(op.ins) == 2 and len(op.ins[0]) == 1 else Rule()


@rule(aten.dropout, aten.native_dropout, aten.alpha_dropout, aten.feature_dropout)
def dropout(op: Op) -> Rule:
    """The identity outside training; in training it must draw the same mask on every rank, so it runs whole."""
    live = op.args.get("train", True) and op.args.get("p", 0.0) > 0
    results = ",".join("..." for _ in op.outs)
    return Rule() if live else einsum(op, f"...->{results}", linear=(frozenset({0}),), empty=len(op.outs) == 1)
