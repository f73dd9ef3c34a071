"""Kernels: fused operators (`autotp.kernels`) in the place of the operators that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from autotp.passes.base import Changes
from autotp.passes.optimise.base import Optimisation, RankProgram

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

    def idle(self, program: RankProgram) -> str:
        """On no device by themselves, compiled or not: none has been measured and compared on one."""
        return "off (optimise={'kernels': True} turns them on)"

    def run(self, program: RankProgram) -> Changes:
        """Which were put in, and how often."""
        fired: Counter[str] = Counter()
        node = program.graph.output_node().prev
        while node.op != "root":  # from the end, so that a longer expression comes before those within it
            node = _rewritten(node, fired).prev
        times = [_times(kernel, n) for kernel, n in sorted(fired.items())]
        program.graph.eliminate_dead_code()
        return Changes(sum(fired.values()), ", ".join(times) or "nowhere: no pattern was found")


def _rewritten(node: fx.Node, fired: Counter[str]) -> fx.Node:
    """What stands in the node's place: a kernel that a pattern put in, or the node."""
    for kernel, pattern in PATTERNS:
        new = pattern(node)
        if new is not None:
            fired[kernel] += 1
            return new
    return node


def _times(kernel: str, n: int) -> str:
    return kernel if n == 1 else f"{kernel} {n} times"
