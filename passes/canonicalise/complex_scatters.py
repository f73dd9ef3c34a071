"""Parts put into complex values, as real ones: torch has no gradient of its scatters for complex numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autotp.ir.graph import Capture
from autotp.ir.op import Op, aten
from autotp.passes.base import Changes, Pass

# A scatter -> the names of its arguments that count dimensions.
SCATTERS: dict[Any, tuple[str, ...]] = {
    aten.select_scatter.default: ("dim",),
    aten.slice_scatter.default: ("dim",),
    aten.diagonal_scatter.default: ("dim1", "dim2"),
}


@dataclass(frozen=True)
class ComplexScatters(Pass[Capture]):
    """`select_scatter` and its like on complex values act on pairs of real numbers, which are the same memory."""

    name: ClassVar[str] = "complex-scatters"

    def run(self, program: Capture) -> Changes:
        scatters = [n for n in program.graph.nodes if n.target in SCATTERS and n.meta["val"].is_complex()]
        for node in scatters:
            _on_pairs(node)
        return Changes(len(scatters), "parts are put into complex values as real ones")


def _on_pairs(node: fx.Node) -> None:
    args = dict(Op.of(node).args)
    whole, part, rank = args.pop("self"), args.pop("src"), node.meta["val"].ndim
    args |= {name: args[name] % rank for name in SCATTERS[node.target]}
    if part.meta["val"].dtype != node.meta["val"].dtype:
        part = _before(node, aten.to.dtype, part, node.meta["val"].dtype)
    pairs = [_before(node, aten.view_as_real.default, _plain(node, x)) for x in (whole, part)]
    if node.target is aten.diagonal_scatter.default:  # a diagonal is the last dimension
        pairs[1] = _before(node, aten.transpose.int, pairs[1], -1, -2)
    scatter = _before(node, node.target, *pairs, *args.values())
    node.replace_all_uses_with(_before(node, aten.view_as_complex.default, scatter))
    node.graph.erase_node(node)


def _plain(node: fx.Node, value: fx.Node) -> fx.Node:
    """A value whose conjugation, if it has one, is done."""
    return _before(node, aten.resolve_conj.default, value) if value.meta["val"].is_conj() else value


def _before(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta = {**node.meta, "val": target(*fx.map_arg(args, lambda n: n.meta["val"]))}
    return call
