"""Rewrites that are made where a table says that they are faster (`autotp.runtime.lower.measured`).

A rewrite says which nodes it replaces and how. The nodes alone, as a function of what they read, are the plain way; a
copy of that function that the rewrite was made in is the other. So what is timed is what the program has, and a rewrite
says nothing of itself beside what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autotp.cost.compute import size_hint
from autotp.ir.graph import copy_graph
from autotp.ir.marks import mark
from autotp.ir.op import is_tensor, packet_of
from autotp.ir.program import MeshPlace

from .optimisation import Alternative, Judge, Optimisation, RankProgram, Value, Verdict

ALONE = Verdict(False, "it cannot be run by itself")


class Rewrite(NamedTuple):
    """A change of a few nodes that is not made yet.

    Attributes:
        nodes: those that it replaces or changes, and those that are timed with it.
        put: makes it, and returns its call.
        arguments: of `put`; nodes in them, at any depth, are nodes of the graph.
    """

    nodes: Sequence[fx.Node]
    put: Callable[..., fx.Node]
    arguments: tuple[Any, ...]


class Judged:
    """The rewrites that one run of an optimisation makes.

    Attributes:
        fired: how many of each name were made.
        reasons: of those that are used (True) or not used somewhere, in words; empty where nobody measures.
    """

    def __init__(self, program: RankProgram, optimisation: Optimisation) -> None:
        """Make none yet; where the optimisation is measured the program's judge will be asked of each."""
        self.fired: Counter[str] = Counter()
        self.reasons: dict[tuple[str, bool], str] = {}
        self._place, self._sends = program.setting.place, optimisation.sends
        self._judge = program.setting.judges.get(optimisation.name)
        self._verdicts: dict[str, Verdict] = {}

    def put(self, name: str, rewrite: Rewrite) -> fx.Node | None:
        """Make a rewrite, unless what is there was measured to be as fast. A collective call where it is measured.

        Args:
            name: in words, and in the table. rewrite: of a graph, which all ranks have alike.

        Returns:
            The call that it put in; None where what is there stays.
        """
        if self._judge is not None:
            verdict = self._verdict(self._judge, name, rewrite)
            self.reasons[name, verdict.used] = verdict.reason
            if not verdict.used:
                return None
        self.fired[name] += 1
        return rewrite.put(*rewrite.arguments)

    def summary(self) -> list[str]:
        """Say what fired, how often and how much faster, and what was refused."""
        parts = []
        for name, count in sorted(self.fired.items()):
            reason = self.reasons.get((name, True), "")
            times = name if count == 1 else f"{name} {count} times"
            parts.append(f"{times} ({reason})" if reason else times)
        return parts + self.refused()

    def refused(self) -> list[str]:
        """Say which rewrites were not made somewhere."""
        return [f"{name} not used ({reason})" for (name, on), reason in sorted(self.reasons.items()) if not on]

    def measured(self) -> list[str]:
        """Say how fast those are that were made."""
        return [f"{name} ({reason})" for (name, on), reason in sorted(self.reasons.items()) if on]

    def _verdict(self, judge: Judge, name: str, rewrite: Rewrite) -> Verdict:
        """Ask the judge of the first rewrite of a line; those that read something that cannot be drawn stay out."""
        nodes = set(rewrite.nodes)
        # A size that has no value, as ranks' own sizes have none, is computed from what it is a size of.
        while sizes := {x for n in nodes for x in n.all_input_nodes if x not in nodes and not _drawable(x)}:
            if any(x.op == "placeholder" for x in sizes):
                return ALONE
            nodes |= sizes
        # Both ways are functions from what the nodes read to what others read of them.
        leaves = list(dict.fromkeys(x for n in sorted(nodes) for x in n.all_input_nodes if x not in nodes))
        results = [n for n in sorted(rewrite.nodes) if not set(n.users) <= nodes]
        if not all(map(is_tensor, results)):
            return ALONE
        operators: list[Any] = [packet_of(n.target) or n.target for n in sorted(rewrite.nodes)]
        names = " ".join(x.__name__ for x in operators)
        operands = [x for x in leaves if is_tensor(x) and not set(rewrite.nodes).isdisjoint(x.users)]
        first = self._place._replace(rank=0)  # the fullest: so a line is the same for all ranks
        key = f"{name} for {names}: {_shape_classes(operands, first)} -> {_shape_classes(results, first)}"
        # A model's blocks ask the same: one line of the table, and one measurement, answers for all.
        if key not in self._verdicts:
            plain, ours = (self._function(sorted(nodes), leaves, results, change) for change in (None, rewrite))
            values = tuple(_value(x, self._place) for x in leaves)
            self._verdicts[key] = judge(Alternative(name, key, plain, ours, values, self._sends))
        return self._verdicts[key]

    def _function(
        self, nodes: list[fx.Node], leaves: list[fx.Node], results: list[fx.Node], rewrite: Rewrite | None
    ) -> fx.GraphModule:
        """Write the nodes as a function from leaves to results, which a rewrite is made in."""
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}
        for i, leaf in enumerate(leaves):
            env[leaf] = graph.placeholder(f"x{i}")
            env[leaf].meta = dict(leaf.meta)
        for node in nodes:
            # A kernel is for what a rank computes: what it sends in between it sends with the kernel and without.
            if mark(node).conversion is not None and not self._sends:
                env[node] = env[node.args[0]]  # type: ignore[index]
            else:
                copy_graph([node], env, graph)
        graph.output(tuple(env[n] for n in results))
        if rewrite is not None:
            rewrite.put(*fx.map_arg(rewrite.arguments, env.__getitem__))  # type: ignore[misc]
            graph.eliminate_dead_code()
        return fx.GraphModule({}, graph)


def retarget(node: fx.Node, target: Any) -> fx.Node:
    """Have a call run by another function of the same arguments."""
    node.target = target
    return node


def _drawable(node: fx.Node) -> bool:
    """Say whether a value can be drawn by itself: one tensor, or a number."""
    return isinstance(node.meta.get("val"), Tensor | int | torch.SymInt)


def _value(node: fx.Node, place: MeshPlace) -> Value:
    val = node.meta["val"]
    if isinstance(val, Tensor):
        return Value(_local(node, place), val.dtype)
    return Value(None, torch.int64, size_hint(val))


def _shape_classes(nodes: Sequence[fx.Node], place: MeshPlace) -> str:
    """Give sizes on a rank, each rounded up to a power of two, and types: "2048x1024 bfloat16, 1024 bfloat16"."""
    words = []
    for node in nodes:
        sizes = [str(1 << (n - 1).bit_length()) for n in _local(node, place)]  # and 0 is one of 2
        words.append(f"{'x'.join(sizes) or 1} {str(node.meta['val'].dtype).removeprefix('torch.')}")
    return ", ".join(words)


def _local(node: fx.Node, place: MeshPlace) -> tuple[int, ...]:
    """Give a value's shape on a rank at the example inputs' sizes."""
    shape, layout = tuple(map(size_hint, node.meta["val"].shape)), mark(node).layout
    if layout is None or layout.distribution is None or layout.sharded_dim is None:
        return shape
    d, static = layout.sharded_dim, layout.distribution.static
    length = layout.local_shape(shape, place.size, place.rank)[d] if static else -(-shape[d] // place.size)
    return (*shape[:d], length, *shape[d + 1 :])
