"""Kernels: fused operators (`autotp.kernels`) in the place of the operators that they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.kernels.common import available
from autotp.passes.base import Changes

from .judged import Judged, Rewrite, retarget
from .kernel_patterns import bias_then_gelu, norm, norm_of_sum
from .optimisation import Optimisation, RankProgram
from .vocabulary import look_up, sum_in_one_pass

OPS: Any = torch.ops.autotp
Pattern = Callable[[fx.Node], Rewrite | None]


def drop(node: fx.Node) -> Rewrite | None:
    """Find a dropout by counter: the call itself, by its kernel."""
    if node.target is not OPS.counter_dropout.default:
        return None
    return Rewrite((node,), retarget, (node, OPS.counter_dropout_fused.default))


# Kernel, and what finds an expression of it that ends in the node. Tried in this order.
PATTERNS: tuple[tuple[str, Pattern], ...] = (
    ("add_norm", norm_of_sum),
    ("norm", norm),
    ("bias_gelu", bias_then_gelu),
    ("vocabulary_rows", look_up),
    ("class_terms", sum_in_one_pass),
    ("counter_dropout", drop),
)


class Kernels(Optimisation):
    """Put kernels into a rank's graph; an expression with a conversion in it, or read in its middle, stays."""

    name = "kernels"
    measurable = True

    def idle(self, program: RankProgram) -> str:
        """Stay off where nobody measures them."""
        setting = program.setting
        if setting.device.type != "cuda" or not available():
            return "nowhere: without Triton on a CUDA device they are plain PyTorch (optimise={'kernels': True})"
        return "" if self.name in setting.judges else "nowhere: not measured (optimise={'kernels': True})"

    def run(self, program: RankProgram) -> Changes:
        """Put in every kernel that was not measured to be slower than what is there."""
        judged = Judged(program, self)
        node = program.graph.output_node().prev
        while node.op != "root":  # from the end, so that a longer expression comes before those within it
            node = (_put(node, judged) or node).prev
        program.graph.eliminate_dead_code()
        return Changes(judged.fired.total(), ", ".join(judged.summary()) or "nowhere: no pattern was found")


def _put(node: fx.Node, judged: Judged) -> fx.Node | None:
    """Put in the first kernel that stands for an expression which ends in this node, and is used."""
    for name, pattern in PATTERNS:
        rewrite = pattern(node)
        new = None if rewrite is None else judged.put(name, rewrite)
        if new is not None:
            return new
    return None
