"""In-place operators on fresh values become their functional twins; what is written stays the same."""

from __future__ import annotations

from typing import Any

from torch import fx

from autotp.rules.core import aten


def functionalise(graph: fx.Graph, state: set[str]) -> bool:
    """Rewrite `x.add_(y)` to `add(x, y)` with later uses of `x` redirected, where no view of `x` can notice.

    Operators that write to a buffer (names of placeholders in `state`) stay: they write to the module's own buffer.
    Returns whether every other in-place operator could be rewritten.
    """
    done = True
    for node in list(graph.nodes):
        if not mutates(node):
            continue
        target = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if target is not None and target.op == "placeholder" and target.name in state:
            continue
        twin = _twin(node.target)
        if target is None or twin is None or target.op == "placeholder" or _aliased(target):
            done = False
            continue
        node.target = twin
        order = {n: i for i, n in enumerate(graph.nodes)}
        target.replace_all_uses_with(node, delete_user_cb=lambda user, n=node, o=order: o[user] > o[n])
    return done


def mutates(node: fx.Node) -> bool:
    """Whether the operator writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _twin(target: Any) -> Any:
    name, overload = str(target).split(".")[1], str(target).split(".")[-1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, overload, None)


def _aliased(node: fx.Node) -> bool:
    """Whether the value shares memory with another: a view of something, or viewed by something."""
    return any(_view(n) for n in (node, *node.users))


def _view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"
    aliases = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return aliases or node.target in (
        aten.reshape.default,
        aten.contiguous.default,
        aten.flatten.using_ints,
        aten.to.dtype,
    )
