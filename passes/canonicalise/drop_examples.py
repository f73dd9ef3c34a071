"""Operands that are only examples: what is read of them is their dtype, device or shape, which are known."""

from __future__ import annotations

from typing import Any

from torch import fx

from autotp import compat
from autotp.ir.graph import Capture, caller
from autotp.ir.op import Op, aten, is_tensor
from autotp.passes.base import Changes, Pass

FACTORIES: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


SHAPED: dict[Any, Any] = {
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
}


class DropExamples(Pass[Capture]):
    """`new_zeros(x, ...)`, `x.type_as(y)` and `x.expand_as(y)` become operators that do not read the example, so it
    may lie anyhow."""

    name = "drop-examples"

    def run(self, program: Capture) -> Changes:
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        count = sum(self._rewrite_new(n) or self._cast(n) or self._shaped(n) for n in calls)
        return Changes(count, "operators do not read the example of a dtype or shape")

    def _rewrite_new(self, node: fx.Node) -> bool:
        if node.target not in FACTORIES:
            return False
        val, (_, *sizes) = node.meta["val"], node.args
        node.kwargs = {**node.kwargs, "dtype": val.dtype, "device": val.device}
        node.args, node.target = tuple(sizes), FACTORIES[node.target]
        return True

    def _cast(self, node: fx.Node) -> bool:
        if node.target not in (aten.type_as.default, aten.to.other) or not is_tensor(node.args[0]):
            return False
        args, val = Op.of(node).args, node.meta["val"]
        if args["self"].meta["val"].device != val.device or args.get("copy") or args.get("memory_format") is not None:
            return False
        node.args, node.kwargs, node.target = (args["self"], val.dtype), {}, aten.to.dtype
        return True

    def _shaped(self, node: fx.Node) -> bool:
        if node.target not in SHAPED:
            return False
        (x, like), call = node.args, caller(node.graph, node)
        with node.graph.inserting_before(node):
            sizes = []
            for dim, size in enumerate(like.meta["val"].shape):  # type: ignore[union-attr]
                sizes.append(size if isinstance(size, int) else call(compat.sym_size, like, dim))
        node.args, node.target = (x, sizes), SHAPED[node.target]
        return True
