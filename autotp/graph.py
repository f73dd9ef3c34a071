"""Questions about a captured graph that several stages ask."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx

from autotp.rules.core import aten

from . import compat
from .capture import Capture

CUTS = (aten.detach.default, aten.detach_.default)


def differentiable(program: Capture) -> set[fx.Node]:
    """Nodes whose value may carry a gradient: floating or complex, and reached from a parameter or such an input."""
    carries: set[fx.Node] = set()
    for leaf in program.leaves:
        val = leaf.node.meta.get("val")
        wanted = leaf.kind == "parameter" or (leaf.kind == "input" and getattr(val, "requires_grad", False))
        if wanted and floating(val):
            carries.add(leaf.node)
    for n in program.graph.nodes:
        if n.op != "call_function" or n.meta.get("no_grad") or n.target in CUTS:
            continue
        if any(i in carries for i in n.all_input_nodes) and floating(n.meta.get("val")):
            carries.add(n)
    return carries


def floating(val: Any) -> bool:
    """Whether a value (or any of several) can carry a gradient."""
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in compat.tree_leaves(val))


def module_path(node: fx.Node) -> tuple[str, ...]:
    """Names of the modules whose forward made this node, outermost first; a later call of one module ends in `@k`."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = []
    for key, entry in stack.items():
        if key.startswith("L__self__") or key.startswith("L['self']"):
            call = re.search(r"@(\d+)$", key)
            paths.append(entry[0] + (call.group(0) if call and "@" not in entry[0] else ""))
    return tuple(p for p in paths if p)


def short_name(target: Any) -> str:
    """`aten.linear` for the overload `aten.linear.default`, a function's own name otherwise."""
    text = str(target)
    return text.removesuffix(".default") if text.startswith("aten") else getattr(target, "__name__", text)
