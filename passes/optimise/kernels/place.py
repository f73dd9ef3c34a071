"""Kernels: fused operators (`autotp.kernels`) in the place of the operators that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autotp.kernels.common import available
from autotp.passes.optimise.base import Optimisation, Setting

from .norm import norm, norm_of_sum
from .pointwise import bias_then_gelu, gate, gate_of_halves
from .rotary import rotate, rotate_pairs
from .vocabulary import look_up, sum_in_one_pass

Pattern = tuple[str, Callable[[fx.Node], fx.Node | None]]
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
)
FASTER: frozenset[str] = frozenset()  # than what Inductor makes of the same graph, by the table in docs/performance.md


@dataclass(frozen=True)
class Kernels(Optimisation):
    """Put kernels into a rank's graph; an expression with a conversion in it, or read in its middle, stays."""

    name: ClassVar[str] = "kernels"

    def idle(self, setting: Setting) -> str:
        """They are for CUDA devices; compiled, only those that were measured to be faster than the compiler's."""
        if setting.device.type != "cuda":
            return f"nowhere: kernels are for CUDA devices, and this is {setting.device.type}"
        if not available():
            return "nowhere: triton is not installed"
        if setting.compiled and not FASTER:
            return "nowhere: none is measured to be faster than what the compiler makes"
        return ""

    def run(self, graph: fx.Graph, setting: Setting) -> str:
        """Which were put in, and how often."""
        fired: Counter[str] = Counter()
        table = [p for p in PATTERNS if not (setting.compiled and FASTER) or p[0] in FASTER]
        node = graph.output_node().prev
        while node.op != "root":  # from the end, so that a longer expression comes before those within it
            node = _rewritten(node, table, fired).prev
        times = (kernel if n == 1 else f"{kernel} {n} times" for kernel, n in sorted(fired.items()))
        return ", ".join(times) or "nowhere: no pattern was found"


def _rewritten(node: fx.Node, table: Sequence[Pattern], fired: Counter[str]) -> fx.Node:
    """What stands in the node's place: a kernel that a pattern put in, or the node."""
    for kernel, pattern in table:
        new = pattern(node)
        if new is not None:
            fired[kernel] += 1
            return new
    return node
