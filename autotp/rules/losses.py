"""Losses: elements are independent, and their sum is contracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotp.ir.layouts import Size, simplify
from autotp.ir.op import Op, Rule, aten
from autotp.ir.specs import Runs
from autotp.kernels.operators import OPS

from .core import einsum, rule
from .lookup import local_index

if TYPE_CHECKING:
    from .local import ShardCall

NONE, MEAN, SUM = range(3)  # as in ATen


@rule(aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.kl_div)
@rule(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.poisson_nll_loss)
def elementwise_loss(op: Op) -> Rule:
    """One number for each element; the mean over a split dimension is a local sum over the whole count."""
    if any(s != op.ins[0] for s in op.ins):
        return Rule()
    result = "..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"{','.join(['...'] * len(op.ins))}->{result}", localise=_local_mean)


def _local_mean(op: Op, local: ShardCall):
    if not local.contracted or op.args["reduction"] != MEAN:
        return local.unchanged(op)
    count: Size = 1
    for n in op.ins[0]:
        count = simplify(count * n)
    target, args, kwargs = local.call(op, {**local.arguments(op), "reduction": SUM})
    return aten.div.Tensor, (local.emit(target, args, kwargs), local.size(count)), {}


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
def cross_entropy(op: Op) -> Rule:
    """Classes stay whole; examples split, but for a mean: how many of them count, the targets say."""
    if len(op.ins[0]) == 1 or op.args["reduction"] == MEAN:
        return Rule()
    target = "n_..." if len(op.ins[1]) == len(op.ins[0]) else "n..."
    result = "n..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"n_...,{target}{',_' * len(op.ins[2:])}->{result}")


@rule(OPS.checked_classes.default)
def checked_classes(op: Op) -> Rule:
    """Stays whole, so that every rank refuses what is no class."""
    return Rule()


@rule(OPS.class_sums.default)
def class_sums(op: Op) -> Rule:
    """Examples split, and classes are summed over: of a target, the rank that has its class."""
    return einsum(op, "nc,n,n->_n", localise=_local_classes, empty=False)


def _local_classes(op: Op, local: ShardCall):
    classes = local.in_partition(0, 1)
    if classes is None:
        return local.unchanged(op)
    target = local.ranked(own_class, local.operand(2), local.runs(classes))
    return local.call(op, {**local.arguments(op), "target": target})


def own_class(target: Tensor, runs: Runs, *, rank: int, tp: int) -> Tensor:
    """Targets as classes of this rank's shard, -1 for those that it does not hold."""
    index, mine = local_index(target, runs, rank, tp)
    return torch.where(mine, index, -1)
