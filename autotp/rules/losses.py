"""Losses and means: elements are independent, and their sum is contracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotp.ir.op import Op, Rule, aten
from autotp.ir.specs import Runs

from .core import product, rule, targets_of
from .lookup import local_index
from .notation import einsum, named_dims

if TYPE_CHECKING:
    from .local import ShardCall

NONE, MEAN, SUM = range(3)  # as in ATen


@rule(
    *targets_of(
        "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits"
    )
)
def elementwise_loss(op: Op) -> Rule:
    """Make the rule of one number for each element; a mean over a split dimension is a local sum / the whole count."""
    if any(s != op.ins[0] for s in op.ins):
        return Rule()
    result = "..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"...->{result}", localise=_local_loss)


def _local_loss(op: Op, local: ShardCall):
    if not local.contracted or op.args["reduction"] != MEAN:
        return local.unchanged(op)
    target, args, kwargs = local.call(op, {**local.arguments(op), "reduction": SUM})
    return aten.div.Tensor, (local.emit(target, args, kwargs), local.sizes.of(product(op.ins[0]))), {}


def local_mean(op: Op, local: ShardCall):
    """Rewrite a mean over a split dimension as the local sum divided by the whole count."""
    if not local.contracted:
        return local.unchanged(op)
    n = len(op.ins[0])
    axes = named_dims(op)
    axes = range(n) if axes is None else axes
    dims = [d % n for d in axes]
    count = product(op.ins[0][d] for d in dims)
    summed = local.emit(
        aten.sum.dim_IntList,
        (local.operands[0], dims, bool(op.args.get("keepdim"))),
        {"dtype": op.args["dtype"]},
    )
    return aten.div.Tensor, (summed, local.sizes.of(count)), {}


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
def cross_entropy(op: Op) -> Rule:
    """Make the rule of classes that stay whole; examples split, except for a mean, whose count depends on targets."""
    if len(op.ins[0]) == 1 or op.args["reduction"] == MEAN:
        return Rule()
    target = "n_..." if len(op.ins[1]) == len(op.ins[0]) else "n..."
    result = "n..." if op.args["reduction"] == NONE else ""
    return einsum(op, f"n_...,{target},_->{result}")


def local_classes(op: Op, local: ShardCall):
    classes = local.in_partition(0, 1)
    if classes is None:
        return local.unchanged(op)
    target = local.ranked(own_class, local.operands[2], local.runs(classes))
    return local.call(op, {**local.arguments(op), "target": target})


def own_class(target: Tensor, runs: Runs, *, rank: int, tp: int) -> Tensor:
    """Convert targets to classes of this rank's shard, -1 for those that it does not have."""
    index, mine = local_index(target, runs, rank, tp)
    return torch.where(mine, index, -1)
