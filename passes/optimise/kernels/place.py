"""Kernels: fused operators (`autotp.kernels`) in the place of the operators that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from autotp.kernels.common import available
from autotp.passes.base import Changes
from autotp.passes.optimise.base import Optimisation, RankProgram
from autotp.passes.optimise.judged import Change, Judged, Position

from .norm import norm, norm_of_sum
from .pointwise import bias_then_gelu, gate, gate_of_halves
from .rotary import rotate, rotate_pairs
from .vocabulary import look_up, sum_in_one_pass

Pattern = tuple[str, Callable[[fx.Node], fx.Node | None]]
OPS: Any = torch.ops.autotp


def fused(of: str, node: fx.Node) -> fx.Node | None:
    """An operator of ours whose kernel takes the same arguments: the call itself, by its kernel."""
    if node.target is not getattr(OPS, of).default:
        return None
    node.target = getattr(OPS, f"{of}_fused").default
    return node


# Kernel, and what puts it in where an expression ends in the node: it returns the new call. Tried in this order.
PATTERNS: tuple[Pattern, ...] = (
    ("add_norm", norm_of_sum),
    ("norm", norm),
    ("gated_halves", gate_of_halves),
    ("gated", gate),
    ("bias_gelu", bias_then_gelu),
    ("rotary", rotate),
    ("rotary", rotate_pairs),
    ("vocabulary_rows", look_up),
    ("class_terms", sum_in_one_pass),
    ("class_terms", partial(fused, "class_sums")),
    ("counter_dropout", partial(fused, "counter_dropout")),
    ("counter_dropout", partial(fused, "counter_uniform")),  # the same drawing, with nothing to drop
)


@dataclass(frozen=True)
class Kernels(Optimisation):
    """Put kernels into a rank's graph; an expression with a conversion in it, or read in its middle, stays."""

    name: ClassVar[str] = "kernels"
    measurable: ClassVar[bool] = True

    def idle(self, program: RankProgram) -> str:
        """Where nobody measures them."""
        setting = program.setting
        if setting.device.type != "cuda" or not available():
            return "nowhere: without Triton on a CUDA device they are plain PyTorch (optimise={'kernels': True})"
        return "" if self.name in setting.judges else "nowhere: not measured (optimise={'kernels': True})"

    def run(self, program: RankProgram) -> Changes:
        """Which were put in, and how often; and which were slower than what is there."""
        judged = Judged(program, self, applied)
        fired = Counter(x.name for x in applied(program.graph, judged.refused))
        program.graph.eliminate_dead_code()
        return Changes(sum(fired.values()), ", ".join(judged.summary(fired)) or "nowhere: no pattern was found")


def applied(graph: fx.Graph, refused: Container[Position] = ()) -> Iterator[Change]:
    """Put in every kernel that is not refused, one after another."""
    node = graph.output_node().prev
    while node.op != "root":  # from the end, so that a longer expression comes before those within it
        change = _apply(node, refused)
        if change is not None:
            yield change
        node = (node if change is None else change.new).prev


def _apply(node: fx.Node, refused: Container[Position]) -> Change | None:
    """The first kernel that stands for an expression which ends in this node, put in its place."""
    for number, (kernel, pattern) in enumerate(PATTERNS):
        if (node, number) not in refused:
            new = pattern(node)
            if new is not None:
                return Change(kernel, (node, number), new)
    return None
