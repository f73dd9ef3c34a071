"""Find expressions in a rank's graph and put one call in their place: what the patterns of kernels are made of."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autotp.ir.marks import inherit, mark
from autotp.ir.op import aten, is_tensor, packet_of
from autotp.ir.scopes import innermost, is_region, scope_path

from .judged import Rewrite

CASTS = (aten.to.dtype, aten._to_copy.default, aten.type_as.default)
COMMUTE = (aten.add, aten.mul)

NOTHING = torch.empty(0, dtype=torch.bool, device="meta")


@dataclass(frozen=True)
class Name:
    """Any argument; equal names are one value. `number`: a literal number, otherwise a node that is a tensor."""

    name: str
    number: bool = False


@dataclass(frozen=True)
class Call:
    """A call of an operator, in any of its overloads, with these arguments and no others."""

    operator: object
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cast:
    """An expression, or a cast of it to another dtype."""

    of: Name | Call | Cast | Either


@dataclass(frozen=True)
class Either:
    """One of these."""

    ways: tuple[Any, ...]


@dataclass(frozen=True)
class Match:
    """An expression that was found: its nodes, the outermost first, and what its names stand for."""

    nodes: tuple[fx.Node, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


def find(pattern: Any, node: fx.Node) -> Match | None:
    """Find the pattern as an expression that ends in this node and whose inner values nothing else reads."""
    return next((m for m in _matches(pattern, node, Match()) if closed(m.nodes, (node,))), None)


def closed(nodes: Sequence[fx.Node], outs: Sequence[fx.Node]) -> bool:
    """Say whether of these nodes nothing but `outs` is read by others, and a checkpointed region holds all or none."""
    inner = set(nodes)
    return one_region(nodes) and all(set(n.users) <= inner for n in inner if n not in outs)


def one_region(nodes: Sequence[fx.Node]) -> bool:
    """Say whether these nodes are in the same checkpointed regions, if in any."""
    return len({tuple(filter(is_region, scope_path(n))) for n in nodes}) == 1


def _matches(pattern: Any, value: Any, so_far: Match) -> Iterator[Match]:
    """Yield every way in which a value is this pattern, each continuing the match so far."""
    if isinstance(pattern, Name):
        # The same name is the same value: x * sigmoid(x) is SiLU, x * sigmoid(y) is none.
        yield from _bind(pattern, value, so_far)
    elif isinstance(pattern, Either):
        # Every way, not the first that fits: what stands around it may bind its names otherwise.
        for way in pattern.ways:
            yield from _matches(way, value, so_far)
    elif isinstance(pattern, Cast):
        # Half precision has a cast where single has none, and a name may stand for the value on either side of it.
        yield from _matches(pattern.of, value, so_far)
        if isinstance(value, fx.Node) and value.target in CASTS:
            yield from _matches(pattern.of, value.args[0], _with(so_far, value))
    elif isinstance(pattern, Call):
        if calls(value, pattern.operator):
            yield from _calls(pattern, value, so_far)
    elif _is_constant(pattern, value):
        yield so_far


def _is_constant(pattern: Any, value: Any) -> bool:
    """Say whether a literal is the pattern's; numbers may have fewer digits, as 0.7978845608 for sqrt(2 / pi)."""
    if isinstance(value, fx.Node):
        return False
    if isinstance(pattern, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return math.isclose(pattern, value, rel_tol=1e-6)
    return pattern == value


def _bind(pattern: Name, value: Any, so_far: Match) -> Iterator[Match]:
    fits = isinstance(value, int | float) if pattern.number else is_tensor(value)
    if fits and so_far.names.get(pattern.name, value) is value:
        yield Match(so_far.nodes, {**so_far.names, pattern.name: value})


def _calls(pattern: Call, node: fx.Node, so_far: Match) -> Iterator[Match]:
    if len(node.args) != len(pattern.args) or dict(node.kwargs) != dict(pattern.kwargs):
        return
    orders = [node.args]
    if pattern.operator in COMMUTE:
        orders.append((node.args[1], node.args[0]))
    for args in orders:
        states = [_with(so_far, node)]
        for inner, value in zip(pattern.args, args, strict=True):
            states = [match for state in states for match in _matches(inner, value, state)]
        yield from states


def _with(so_far: Match, node: fx.Node) -> Match:
    return so_far if node in so_far.nodes else Match((*so_far.nodes, node), so_far.names)


def calls(node: Any, *operators: Any) -> bool:
    """Say whether this is a call of one of these operators, in any overload."""
    return isinstance(node, fx.Node) and packet_of(node.target) in operators


def value_of(node: fx.Node) -> Tensor:
    """Give the (fake) whole value of a node: its dtype is a rank's, its shape is not.

    What stands for no value of the captured graph, such as a rank's own mask, has none: that is `NOTHING`, of no type
    that a kernel takes.
    """
    return node.meta.get("val", NOTHING)


def whole_rows(node: fx.Node) -> bool:
    """Say whether every rank has this node's value, not a summand of it, whole along the last dimension."""
    layout = mark(node).layout
    if layout is None:
        return True
    return not layout.partial and layout.sharded_dim != value_of(node).ndim - 1


def summable(node: fx.Node) -> bool:
    """Say whether all of the node's rows on a rank may be read: a kernel that sums over rows reads them all."""
    layout = mark(node).layout
    return layout is None or layout.groups is None


def scope_of(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Find the innermost module call or checkpointed region that holds all these nodes."""
    return innermost(map(scope_path, nodes))


def put(
    target: Callable[..., Any], args: tuple[Any, ...], nodes: Sequence[fx.Node], out: fx.Node, *others: fx.Node | None
) -> fx.Node:
    """Put a call in the place of these nodes, which are erased.

    It belongs to the innermost module that holds them all, so that the module tree stays as it is.

    Args:
        target, args: of the call.
        nodes: what it computes.
        out: the last of them, whose value the call gives; with `others` its first result.
        others: whose values its next results are; None for one that nothing reads.

    Returns:
        The call.
    """
    outs, scope, graph = [out, *others], scope_of(nodes), out.graph
    with graph.inserting_before(out):
        new = graph.call_function(target, args)
        # One result is the call itself; several are a tuple, and what read them reads its items.
        results = [new]
        if others:
            results = [graph.call_function(operator.getitem, (new, i)) for i in range(len(outs))]
    # Several results have a layout each, which their items say.
    inherit(new, out, scope=scope, axis=None, layout=None if others else mark(out).layout)
    if others:
        new.meta["val"] = []
    for old, result in zip(outs, results, strict=True):
        if others:
            new.meta["val"].append(old.meta["val"] if old is not None else None)
        if old is None:  # the statistics of a norm in inference
            graph.erase_node(result)
            continue
        if result is not new:
            inherit(result, old, scope=scope, axis=None)
        old.replace_all_uses_with(result)
    # Last: fx refuses to erase a node that something reads.
    erase(nodes)
    return new


def call_in_place(
    target: Callable[..., Any], args: tuple[Any, ...], nodes: Sequence[fx.Node], out: fx.Node, *others: fx.Node | None
) -> Rewrite:
    """Describe what `put` would do with these arguments."""
    return Rewrite(nodes, put, (target, args, nodes, out, *others))


def erase(nodes: Sequence[fx.Node]) -> None:
    """Remove nodes that only each other read."""
    for node in sorted(set(nodes), reverse=True):
        node.graph.erase_node(node)
