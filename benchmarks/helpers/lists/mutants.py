"""A program of the ranks with one of its conversions left out, done twice, or replaced by another of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autotp.comm import conversions
from autotp.ir.graph import copy_graph, size_hint, tensors
from autotp.ir.layouts import Groups, Partition, Shard
from autotp.ir.marks import mark
from autotp.ir.op import sizes
from autotp.ir.program import Planned, Sharded
from autotp.ir.specs import INVARIANT, REPLICATED, SUMMANDS, Spec

WHOLE = {"I": INVARIANT, "R": REPLICATED, "P": SUMMANDS}


@dataclass
class Mutant:
    """A wrong program: what was done to which conversion."""

    kind: str
    node: str
    program: Sharded

    def __str__(self) -> str:
        return f"{self.kind} at {self.node}"


def mutants(planned: Planned, sharded: Sharded) -> Iterator[Mutant]:
    """Every mutant of a program, one after another.

    Args:
        planned: the decided graph. sharded: its program, which stays as it is.
    """
    for node in sharded.graph.nodes:
        if mark(node).conversion is None:
            continue
        for kind, change in CHANGES.items():
            copy, nodes = copied(sharded)
            change(copy, nodes[node])
            yield Mutant(kind, node.name, copy)
        for name, src, dst in others(planned, sharded, node):
            copy, nodes = copied(sharded)
            nodes[node].target = conversions.FUNCTIONS[name]
            literals: Any = (node.args[0], src, dst)
            nodes[node].args = fx.map_arg(literals, nodes.__getitem__)
            yield Mutant(f"{name} for {_name(node)}", node.name, copy)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def copied(sharded: Sharded) -> tuple[Sharded, dict[fx.Node, fx.Node]]:
    """A copy of a program, which may be changed, and its node for each of the original's."""
    graph, env = copy_graph(sharded.graph.nodes)
    to: Any = dict(env)
    layouts = {to[n]: x for n, x in sharded.layouts.items()}
    origin = {to[n]: x for n, x in sharded.origin.items()}
    ends = {to[n]: to[x] for n, x in sharded.ends.items()}
    return replace(sharded, graph=graph, layouts=layouts, origin=origin, ends=ends), to


def drop(sharded: Sharded, node: fx.Node) -> None:
    """The readers of a conversion take what it would convert."""
    node.replace_all_uses_with(node.all_input_nodes[0])
    sharded.graph.erase_node(node)
    del sharded.layouts[node], sharded.origin[node]


def double(sharded: Sharded, node: fx.Node) -> None:
    """A conversion is applied to its own result."""
    with sharded.graph.inserting_after(node):
        again = sharded.graph.node_copy(node, lambda n: n)
    node.replace_all_uses_with(again)
    again.args = (node, *again.args[1:])
    sharded.layouts[again], sharded.origin[again] = sharded.layouts[node], sharded.origin[node]


CHANGES = {"dropped": drop, "doubled": double}


def others(planned: Planned, sharded: Sharded, node: fx.Node) -> Iterator[tuple[str, Spec, Spec]]:
    """Every other conversion of the table that can be written in this one's place."""
    specs: Any = node.args[1:3]
    own = {spec.mark: spec for spec in specs}
    made, index = sharded.origin[node]
    shape = [size_hint(n, planned.program.hints) for n in sizes(tensors(made)[index])]
    slices = [_plain(d, n, planned.tp) for d, n in enumerate(shape) if n >= planned.tp]
    grouped = rows_by_group(planned, sharded, node, shape)
    for (a, b), kind in conversions.KINDS.items():
        sides = {
            "S": own.get("S", slices[0] if slices else None),
            **WHOLE,
            **{k: v for k, v in own.items() if k in "IRP"},
            "G": own.get("G", grouped),
        }
        src = sides.get(a)
        dst = _other(b, src, shape, slices, planned.tp) if a == "S" and b[0] == "S" else sides.get(b)
        if src is not None and dst is not None and (src, dst) != tuple(specs):
            yield kind.name, src, dst


def rows_by_group(planned: Planned, sharded: Sharded, node: fx.Node, shape: list[int]) -> Spec | None:
    """Rows of some groups, where as many rows lie so in the program and the groups' ends are known before `node`.

    Args:
        planned, sharded, node: as for `others`. shape: of the whole value.
    """
    order = {n: i for i, n in enumerate(sharded.graph.nodes)}
    for rows, ends in sharded.ends.items():
        made, index = sharded.origin[rows]
        layout = sharded.layouts[rows]
        dim = layout.groups and layout.dim  # type: ignore[attr-defined]
        if dim is None or order[ends] > order[node] or dim >= len(shape):
            continue
        if shape[dim] == size_hint(sizes(tensors(made)[index])[dim], planned.program.hints):
            return layout.to_runtime(lambda size, ends=ends: ends if isinstance(size, Groups) else size)
    return None


def _plain(dim: int, length: int, tp: int) -> Spec:
    return Shard(dim, Partition.plain(length, tp)).to_runtime()


def _other(b: str, src: Spec | None, shape: list[int], slices: list[Spec], tp: int) -> Spec | None:
    """Another slice: of another dimension, or of the same one dealt otherwise."""
    if src is None or src.dim is None:
        return None
    if b == "S":
        return next((s for s in slices if s.dim != src.dim), None)
    length = shape[src.dim]
    return (
        Shard(src.dim, Partition.plain(length // 2, tp).lift(2, 1, tp)).to_runtime() if length % (2 * tp) == 0 else None
    )
