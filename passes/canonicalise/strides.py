"""Operators that read memory rather than values get an operand that is laid out as it was in the capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from autotp.ir.graph import Capture
from autotp.ir.op import aten, expression
from autotp.passes.base import Changes, Pass


@dataclass(frozen=True)
class Reshape(Pass[Capture]):
    """A view becomes a reshape: that memory allows it was decided on strides that real values need not have."""

    name: ClassVar[str] = "reshape"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.view.default]
        for node in views:
            node.target = aten.reshape.default
        return Changes(len(views), "views are reshapes")


@dataclass(frozen=True)
class LayOut(Pass[Capture]):
    """`as_strided` picks elements by their place in memory, and a rank's value may lie there in another order."""

    name: ClassVar[str] = "lay-out"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.as_strided.default]
        laid = sum(self._lay_out(program.graph, n) for n in views)
        return Changes(laid, "operands are laid out in memory as they were captured")

    def _lay_out(self, graph: fx.Graph, node: fx.Node) -> bool:
        operand = node.all_input_nodes[0]
        order = dense_order(operand.meta["val"])
        if order is None:
            return False
        with graph.inserting_before(node):
            for target, rest in ((aten.permute.default, (order,)), (aten.contiguous.default, ())):
                call = graph.call_function(target, (operand, *rest))
                call.meta = {**node.meta, "val": target(operand.meta["val"], *rest)}
                operand = call
        node.args = (operand, *node.args[1:])
        return True


def dense_order(val: Tensor) -> list[int] | None:
    """The dimensions from the slowest to the fastest of a tensor that fills its memory; None where it does not."""
    if val.storage_offset() != 0 or val.untyped_storage().nbytes() != val.numel() * val.element_size():
        return None
    sizes = [expression(n) for n in val.shape]
    strides = [expression(n) for n in val.stride()]
    order, step = [], expression(1)
    for _ in sizes:
        fits = [d for d in range(len(sizes)) if d not in order and (strides[d] == step or sizes[d] == 1)]
        if not fits:
            return None
        order.append(fits[-1])
        step = expression(step * sizes[fits[-1]])
    return order[::-1]
