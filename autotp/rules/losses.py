"""Losses: elements are independent, and their sum is contracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotp.layouts import Size, simplify

from .core import Op, Rule, aten, einsum, rule

if TYPE_CHECKING:
    from autotp.localise import Local

NONE, MEAN, SUM = range(3)  # as in ATen


@rule(aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.kl_div)
@rule(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.poisson_nll_loss)
def elementwise_loss(op: Op) -> Rule:
    """One number for each element; the mean over a split dimension is a local sum over the whole count."""
    if any(s != op.ins[0] for s in op.ins):
        return Rule()
    kept = "..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"{','.join(['...'] * len(op.ins))}->{kept}", localise=_local_mean)


def _local_mean(op: Op, local: Local):
    if not local.contracted or op.args["reduction"] != MEAN:
        return local.unchanged(op)
    count: Size = 1
    for n in op.ins[0]:
        count = simplify(count * n)
    target, args, kwargs = local.call(op, {**local.named(op), "reduction": SUM})
    return aten.div.Tensor, (local.emit(target, args, kwargs), local.size(count)), {}


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
def cross_entropy(op: Op) -> Rule:
    """Classes stay whole; examples split, but for a mean: how many of them count, the targets say."""
    if len(op.ins[0]) == 1 or op.args["reduction"] == MEAN:
        return Rule()
    target = "n_..." if len(op.ins[1]) == len(op.ins[0]) else "n..."
    kept = "n..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"n_...,{target}{',_' * len(op.ins[2:])}->{kept}")
