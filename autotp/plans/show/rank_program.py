"""The program of one rank as text to read.

A heading for each module, and a line for each node:

    # model.layers.0.mlp.down_proj
    linear_6: P [s72, s70, 64] = aten.linear(mul_4, p_model_layers_0_mlp_down_proj_weight)
    f_star: I [s72, s70, 64] = f*(linear_6: P -> I)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autotp.ir.graph import short_name
from autotp.ir.layouts import Layout
from autotp.ir.marks import mark
from autotp.ir.scopes import module_path, moved_to

from .document import MARKS


def render_graph(graph: fx.Graph, layouts: Mapping[fx.Node, Layout] | None = None) -> str:
    """Write the program of one rank: a heading for each module, and for each node a line `name: layout [whole shape] =
    operator(operands)`, with the collectives marked f, f*, g, g* and by their names.

    Args:
        graph: as `autotp.passes.shard.rewrite` made it.
        layouts: of its nodes; otherwise read from each node's mark.
    """
    return "\n".join(_lines(graph, layouts or {})) + "\n"


def _lines(graph: fx.Graph, layouts: Mapping[fx.Node, Layout]) -> Iterator[str]:
    at = ""
    for node in graph.nodes:
        # A conversion that was moved stands where it runs now; a heading stands before the first node of a module.
        module = ("", *(moved_to(node) or module_path(node)))[-1]
        if node.op not in ("placeholder", "output") and module != at:
            at = module
            yield f"\n# {module or '(top)'}"
        if node.op == "output":
            yield f"\nreturn {node.args[0]}"
            continue
        layout = layouts.get(node, mark(node).layout)
        shape = getattr(node.meta.get("val"), "shape", None)
        where = f" [{', '.join(map(str, shape))}]" if shape is not None else ""
        typed = f"{node.name}: {layout}{where}" if layout is not None else f"{node.name}{where}"
        yield f"{typed} = {_call(node)}" if node.op == "call_function" else typed


def _call(node: fx.Node) -> str:
    name = short_name(node.target)
    if (conversion := mark(node).conversion) is not None:
        source, target = conversion
        return f"{MARKS.get(name, name)}({node.args[0]}: {source} -> {target})"
    arguments = [str(a) for a in node.args]
    arguments += [f"{k}={v}" for k, v in node.kwargs.items() if k not in ("rank", "tp", "group")]
    return f"{name}({', '.join(arguments)})"
