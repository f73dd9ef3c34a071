"""Batch norms in training: the running statistics that one writes become results of its own, and outputs.

Torch's operator writes to its operands, and no schema says so: every rank would have to run it whole, to keep the same
statistics. As results they split with the channels, and what a rank's channels come to is gathered: two rows a norm.
"""

from __future__ import annotations

import operator

from torch import fx

from autotp.ir.graph import BUFFER, Capture, before, replace_node
from autotp.ir.op import Op, aten
from autotp.kernels.operators import OPS
from autotp.passes.base import Changes, Pass


class RunningStatistics(Pass[Capture]):
    """Makes running statistics results of the batch norm that writes them."""

    name = "running-statistics"

    def idle(self, program: Capture) -> str:
        """Run only where there are some."""
        targets = {n.target for n in program.graph.nodes}
        return "" if aten.batch_norm.default in targets else "no batch norm"

    def run(self, program: Capture) -> Changes:
        buffers = {leaf.node: leaf.name for leaf in program.leaves if leaf.kind is BUFFER}
        final: dict[str, fx.Node] = {}
        norms = [n for n in program.graph.nodes if n.target is aten.batch_norm.default and n.args[5] is True]
        count = 0
        for node in norms:
            if all(Op.of(node).args[name] in buffers for name in ("running_mean", "running_var")):
                final |= _functional(node, buffers)
                count += 1
        takers = set(program.mutations.values())
        program.write_back({name: value for name, value in final.items() if name not in takers})
        return Changes(count, "batch norms have their running statistics as results")


def _functional(node: fx.Node, buffers: dict[fx.Node, str]) -> dict[str, fx.Node]:
    """Rewrite the norm with its statistics as results, which later readers of the buffers read.

    Args:
        node: the norm. buffers: values that buffers have -> their names; those that are made here are added.

    Returns: buffer -> the value that it has now.
    """
    args = Op.of(node).args
    with before(node) as call:
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps", "cudnn_enabled")
        norm = call(OPS.batch_norm.default, *(args[name] for name in names))
        result, *statistics = [call(operator.getitem, norm, i) for i in range(3)]
        statistics = [call(aten.detach.default, x) for x in statistics]
    replace_node(node, result)
    final = {}
    for name, value in zip(("running_mean", "running_var"), statistics, strict=True):
        earlier = args[name]
        earlier.replace_all_uses_with(value, delete_user_cb=lambda user, value=value: user > value)
        buffers[value] = buffers[earlier]
        final[buffers[earlier]] = value
    return final
