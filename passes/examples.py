"""Operands that are only examples: what is read of them is their dtype and device, which are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autotp.graph import Capture
from autotp.rules.core import Op, aten, is_tensor

from .base import Pass

PLAIN: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


@dataclass(frozen=True)
class DropExamples(Pass):
    """`new_zeros(x, ...)` and `x.type_as(y)` become operators that do not read the example, so it may lie anyhow."""

    name: ClassVar[str] = "drop-examples"

    def run(self, program: Capture) -> int:
        return sum(self._made(n) or self._cast(n) for n in program.graph.nodes if n.op == "call_function")

    def _made(self, node: fx.Node) -> bool:
        if node.target not in PLAIN:
            return False
        val, (_, *sizes) = node.meta["val"], node.args
        node.kwargs = {**node.kwargs, "dtype": val.dtype, "device": val.device}
        node.args, node.target = tuple(sizes), PLAIN[node.target]
        return True

    def _cast(self, node: fx.Node) -> bool:
        if node.target not in (aten.type_as.default, aten.to.other) or not is_tensor(node.args[0]):
            return False
        args, val = Op.of(node).args, node.meta["val"]
        if args["self"].meta["val"].device != val.device or args.get("copy") or args.get("memory_format") is not None:
            return False
        node.args, node.kwargs, node.target = (args["self"], val.dtype), {}, aten.to.dtype
        return True
