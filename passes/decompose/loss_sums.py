"""Losses decomposed, so that examples and classes can be sharded; and graphs that give the loss alone.

A cross entropy over a vocabulary needs all scores of an example, and its mean how many examples count. Decomposed it
is a maximum, sums over the classes (`autotp.kernels.operators.class_sums`) and a sum over the examples, for which
the rules say how they split: with the classes sharded a few numbers an example are sent, and never the scores.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import InputError
from autotp.ir.graph import Capture, Emit, before, replace_node, tensors
from autotp.ir.op import Op, aten
from autotp.kernels.operators import OPS
from autotp.passes.base import Changes, Pass
from autotp.rules.losses import MEAN, NONE

CROSS_ENTROPIES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
NO_LOSS = "Give it what its loss needs (labels=..., or the targets= of loss=), or use outputs='full'."
SEVERAL = (
    "Say which of them is the loss, such as loss=lambda outputs, targets: outputs.loss, with targets= among the "
    "example inputs, or use outputs='full'. A mixture of experts gives its auxiliary loss beside the one that holds it."
)


class DecomposeLosses(Pass[Capture]):
    """Decomposes cross entropies into maxima and sums over classes and examples, each with a rule of its own."""

    name = "decompose-losses"
    priced = True

    def idle(self, program: Capture) -> str:
        """Run only where there is one."""
        targets = {n.target for n in program.graph.nodes}
        return "no cross entropy" if targets.isdisjoint(CROSS_ENTROPIES) else ""

    def run(self, program: Capture) -> Changes:
        program.own_graph()
        losses = [n for n in program.graph.nodes if n.target in CROSS_ENTROPIES]
        for node in losses:
            _check_classes(Op.of(node))
        take_sums_apart(program)
        for node in program.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
            _classes_apart(Op.of(node))
        return Changes(len(losses), "cross entropies are sums over classes and examples")


def take_sums_apart(program: Capture) -> None:
    """Replace a cross entropy that is a sum or a mean by the sum of its elements, over what counts: the targets say.

    The sum is taken in float32 at least, as half precision cannot hold it.
    """
    for node in list(program.graph.nodes):
        if node.target in CROSS_ENTROPIES:
            op = Op.of(node)
            if op.args["reduction"] != NONE and len(op.ins[0]) > 1:
                _sum_apart(op)


@dataclass(frozen=True)
class LossAlone(Pass[Capture]):
    """Drops all outputs but the loss; what the forward writes to buffers stays.

    Attributes:
        outputs: what is asked for; only "loss" changes anything.
    """

    name = "loss-alone"
    outputs: str = "loss"

    def idle(self, program: Capture) -> str:
        """Run only where that is asked for."""
        return "" if self.outputs == "loss" else f"outputs={self.outputs!r}"

    def run(self, program: Capture) -> Changes:
        """Drop the other outputs.

        Raises:
            InputError: the program has no loss, or several values that could be it.
        """
        program.own_graph()
        output = program.graph.output_node()
        values = program.results
        mutations = [i for i in range(len(values)) if i in program.mutations]
        losses = [i for i, x in enumerate(values) if i not in mutations and isinstance(x, fx.Node) and _is_loss(x)]
        if len(losses) != 1:
            raise InputError(
                f"outputs='loss' needs a model that gives one floating-point scalar, and this one gives {len(losses)}. "
                + (SEVERAL if losses else NO_LOSS)
            )
        output.args = (tuple(values[i] for i in [*mutations, *losses]),)
        program.graph.eliminate_dead_code()
        program.mutations = {k: program.mutations[i] for k, i in enumerate(mutations)}
        program.out_spec = compat.tree_flatten(0)[1]
        return Changes(len(values) - len(mutations) - 1, "outputs are left out")


def with_loss(model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> nn.Module:
    """Copy a model, with the same modules and weights, whose forward gives `loss(model(...), targets)` where it gets
    `targets=`; without, as in `generate()`, the model's own outputs."""
    kind, signature = type(model), inspect.signature(model.forward)

    def forward(self: nn.Module, *args: Any, targets: Any = ..., **kwargs: Any) -> Any:
        outputs = kind.forward(self, *args, **kwargs)
        return outputs if targets is ... else loss(outputs, targets)

    parameters = list(signature.parameters.values())
    rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    targets = inspect.Parameter("targets", inspect.Parameter.KEYWORD_ONLY, default=...)
    instance = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[instance, *(p for p in parameters if p not in rest), targets, *rest]
    )
    copied = copy.copy(model)
    copied.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return copied


def _is_loss(node: fx.Node) -> bool:
    return [v.ndim for v in tensors(node)] == [0] and tensors(node)[0].is_floating_point()


def _check_classes(op: Op) -> None:
    """Check targets before they are sharded: what is no class is then refused, and on every rank.

    A rank that has not the class could not distinguish it from one that another rank has.
    """
    target, dim = op.args["target"], min(len(op.ins[0]) - 1, 1)
    classes: Any = op.ins[0][dim]
    if target.meta["val"].is_floating_point() or target.target is OPS.checked_classes.default:
        return
    with before(op.node) as call:
        classes = classes if isinstance(classes, int) else call(compat.sym_size, op.args["self"], dim)
        checked = call(OPS.checked_classes.default, target, classes, op.args["ignore_index"])
    op.node.replace_input_with(target, checked)


def _sum_apart(op: Op) -> None:
    dtype = op.node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    with before(op.node) as call:
        elements = call(op.target, *{**op.args, "reduction": NONE}.values())
        total = call(aten.sum.default, elements, dtype=wide)
        if op.args["reduction"] == MEAN:
            total = call(aten.div.Tensor, total, call(aten.sum.default, _counting(call, op), dtype=wide))
        total = call(aten.to.dtype, total, dtype) if wide != dtype else total
    replace_node(op.node, total)


def _counting(call: Emit, op: Op) -> fx.Node:
    """Weigh each example in the mean: one, or its class's weight; nothing where it is to be ignored."""
    target = op.args["target"]
    if target.meta["val"].is_floating_point():  # probabilities of classes: every example counts
        return call(aten.ones_like.default, call(aten.select.int, target, 1, 0))
    counts = call(aten.ne.Scalar, target, op.args["ignore_index"])
    return counts if op.args["weight"] is None else call(aten.mul.Tensor, _weights(call, op, counts), counts)


def _weights(call: Emit, op: Op, counts: fx.Node) -> fx.Node:
    """Look up the weight of every target's class."""
    targets = call(aten.where.ScalarOther, counts, op.args["target"], 0)
    table = call(aten.unsqueeze.default, op.args["weight"], 1)
    return call(aten.squeeze.dim, call(aten.embedding.default, table, targets), -1)


def _classes_apart(op: Op) -> None:
    """Write the loss of each example by sums over its classes."""
    scores, target, smoothing = op.args["self"], op.args["target"], op.args["label_smoothing"]
    weighted, soft = op.args["weight"] is not None, target.meta["val"].is_floating_point()
    if soft or len(op.ins[0]) != 2 or not isinstance(op.ins[0][1], int) or (weighted and smoothing):
        return
    with before(op.node) as call:
        # The largest score keeps the exponentials finite and cancels in the loss, so it needs no gradient.
        most = call(aten.amax.default, call(aten.detach.default, scores), [1])
        sums = call(OPS.class_sums.default, scores, most, target, smoothing > 0)
        row = [call(aten.select.int, sums, 0, i) for i in range(2 + (smoothing > 0))]
        whole = call(aten.log.default, row[0])
        loss = call(aten.sub.Tensor, whole, row[1])
        if smoothing:
            spread = call(aten.sub.Tensor, whole, call(aten.div.Tensor, row[2], op.ins[0][1]))
            parts = [call(aten.mul.Tensor, x, share) for x, share in ((loss, 1 - smoothing), (spread, smoothing))]
            loss = call(aten.add.Tensor, *parts)
        counts = call(aten.ne.Scalar, target, op.args["ignore_index"])
        if weighted:
            loss = call(aten.mul.Tensor, loss, _weights(call, op, counts))
        # Last, so that what is ignored is zero whatever came of its scores, and has no gradient.
        loss = call(aten.where.ScalarOther, counts, loss, 0.0)
        loss = call(aten.to.dtype, loss, scores.meta["val"].dtype)
    replace_node(op.node, loss)
