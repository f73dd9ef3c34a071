"""Mean losses taken apart: the sum over the examples and their number, each of which may be dealt out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autotp.rules.core import Op, aten
from autotp.rules.losses import MEAN, NONE

from .graph import Capture

CROSS_ENTROPIES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)


def take_means_apart(program: Capture) -> None:
    """Every mean cross entropy becomes the sum of its elements over what counts: how many do, the targets say.

    The sum is taken in float32 at least, as half precision cannot hold it.
    """
    for node in list(program.graph.nodes):
        if node.target in CROSS_ENTROPIES:
            op = Op.of(node)
            if op.args["reduction"] == MEAN and len(op.ins[0]) > 1:
                _take_apart(program.graph, op)


def _take_apart(graph: fx.Graph, op: Op) -> None:
    node, dtype = op.node, op.node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    target: Any = op.args["target"]

    def call(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(function, args, kwargs)
        new.meta = {**node.meta, "val": function(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)}
        return new

    with graph.inserting_before(node):
        elements = call(op.target, *(NONE if k == "reduction" else v for k, v in op.args.items()))
        total = call(aten.sum.default, elements, dtype=wide)
        count = call(aten.sum.default, _weights(call, op, target), dtype=wide)
        mean = call(aten.div.Tensor, total, count)
        mean = call(aten.to.dtype, mean, dtype) if wide != dtype else mean
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _weights(call: Any, op: Op, target: fx.Node) -> fx.Node:
    """What each example counts in the mean: one, or its class's weight; nothing where it is to be ignored."""
    if len(op.ins[op.slot("target") or 1]) == len(op.ins[0]):  # probabilities of classes: every example counts
        return call(aten.ones_like.default, call(aten.select.int, target, 1, 0))
    counts = call(aten.ne.Scalar, target, op.args["ignore_index"])
    if op.args["weight"] is None:
        return counts
    known = call(aten.where.ScalarOther, counts, target, 0)
    weights = call(aten.embedding.default, call(aten.unsqueeze.default, op.args["weight"], 1), known)
    return call(aten.mul.Tensor, weights, call(aten.unsqueeze.default, counts, -1))
