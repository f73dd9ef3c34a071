"""Operators that read memory rather than values get an operand that is laid out as it was in the capture."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from autotp.ir.graph import Capture, caller
from autotp.ir.op import Op, aten, expression
from autotp.passes.base import Changes, Pass


class Reshape(Pass[Capture]):
    """A view becomes a reshape: that memory allows it was decided on strides that real values need not have."""

    name = "reshape"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.view.default]
        for node in views:
            node.target = aten.reshape.default
        return Changes(len(views), "views are reshapes")


class LayOut(Pass[Capture]):
    """`as_strided` picks elements by their place in memory, and a rank's value may lie there in another order."""

    name = "lay-out"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.as_strided.default]
        laid = sum(self._lay_out(program.graph, n) for n in views)
        return Changes(laid, "operands are laid out in memory as they were captured")

    def _lay_out(self, graph: fx.Graph, node: fx.Node) -> bool:
        operand = node.all_input_nodes[0]
        order = dense_order(operand.meta["val"])
        if order is None:
            return False
        call = caller(graph, node)
        with graph.inserting_before(node):
            laid = call(aten.contiguous.default, call(aten.permute.default, operand, order))
        node.args = (laid, *node.args[1:])
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


# ---- complex scatters ------------------------------------------------------------------------------------------------

# Parts put into complex values, as real ones: torch has no gradient of its scatters for complex numbers.

# A scatter -> the names of its arguments that count dimensions.
SCATTERS: dict[Any, tuple[str, ...]] = {
    aten.select_scatter.default: ("dim",),
    aten.slice_scatter.default: ("dim",),
    aten.diagonal_scatter.default: ("dim1", "dim2"),
}


class ComplexScatters(Pass[Capture]):
    """`select_scatter` and its like on complex values act on pairs of real numbers, which are the same memory."""

    name = "complex-scatters"

    def run(self, program: Capture) -> Changes:
        scatters = [n for n in program.graph.nodes if n.target in SCATTERS and n.meta["val"].is_complex()]
        for node in scatters:
            with program.graph.inserting_before(node):
                node.replace_all_uses_with(_on_pairs(node))
            program.graph.erase_node(node)
        return Changes(len(scatters), "parts are put into complex values as real ones")


def _on_pairs(node: fx.Node) -> fx.Node:
    """Write the scatter as one of pairs of real numbers, at the insertion point."""
    args, call = dict(Op.of(node).args), caller(node.graph, node)
    whole, part, rank = args.pop("self"), args.pop("src"), node.meta["val"].ndim
    args |= {name: args[name] % rank for name in SCATTERS[node.target]}
    if part.meta["val"].dtype != node.meta["val"].dtype:
        part = call(aten.to.dtype, part, node.meta["val"].dtype)
    pairs: list[fx.Node] = []
    for x in (whole, part):
        # A conjugate that is not computed yet has no pairs in memory.
        x = call(aten.resolve_conj.default, x) if x.meta["val"].is_conj() else x
        pairs.append(call(aten.view_as_real.default, x))
    if node.target is aten.diagonal_scatter.default:  # a diagonal is the last dimension
        pairs[1] = call(aten.transpose.int, pairs[1], -1, -2)
    return call(aten.view_as_complex.default, call(node.target, *pairs, *args.values()))
