"""Pointwise operators: every result dimension is a loop; operands broadcast."""

from __future__ import annotations

from .core import Op, Rule, aten, einsum, rule

LINEAR_IN_FIRST = {
    aten.neg, aten.to, aten._to_copy, aten.contiguous, aten.clone, aten.alias, aten.real, aten.detach, aten.lift_fresh_copy,
}  # fmt: skip
TOGETHER = {aten.add, aten.sub}  # linear in both operands at once
PRODUCT = {aten.mul}  # linear in either operand
QUOTIENT = {aten.div}  # linear in the numerator


def _linear(op: Op) -> tuple[frozenset[int], ...]:
    packet = op.target.overloadpacket
    if packet in LINEAR_IN_FIRST or (packet in QUOTIENT and op.args.get("rounding_mode") is None):
        return (frozenset({0}),) if op.slot("self") == 0 else ()
    if packet in TOGETHER and len(op.slots) == 2:
        return (frozenset({0, 1}),)
    if packet in PRODUCT:
        return tuple(frozenset({i}) for i in range(len(op.slots)))
    if packet is aten.where and op.names == ["condition", "self", "other"]:
        return (frozenset({1, 2}),)
    if packet is aten.masked_fill and op.args["value"] == 0:
        return (frozenset({0}),)
    return ()


@rule("pointwise", aten.to, aten.contiguous, aten.clone, aten.alias, aten.detach, aten.detach_, aten._to_copy)
def pointwise(op: Op) -> Rule:
    terms = ",".join("..." for _ in op.ins)
    return einsum(op, f"{terms}->...", linear=_linear(op))


@rule(
    aten.lift_fresh_copy,
    aten.lift_fresh,
    aten.type_as,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
)
@rule(aten.feature_dropout, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.real, aten.imag)
@rule(aten.__and__, aten.__or__, aten.__xor__, aten.relu6, aten.selu, aten.prelu.default, aten.square, aten.float_power)
@rule(aten.softplus, aten.hardswish, aten.log_sigmoid, aten.mish, aten.clip, aten.ldexp, aten.true_divide)
def untagged(op: Op) -> Rule:
    """Pointwise too, though torch does not tag them."""
    if op.target is aten.prelu.default and op.ins[1] != (1,):
        return einsum(op, "bc...,c->bc...")
    return pointwise(op)


@rule(aten.dropout, aten.native_dropout, aten.alpha_dropout, aten.feature_dropout)
def dropout(op: Op) -> Rule:
    """The identity outside training; in training it must draw the same mask on every rank, so it runs whole."""
    live = op.args.get("train", True) and op.args.get("p", 0.0) > 0
    return Rule() if live else einsum(op, "...->...", linear=(frozenset({0}),))
