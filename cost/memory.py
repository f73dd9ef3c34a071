"""What a rank holds: parameters, gradients, optimizer states, activations over time, keys and values of a cache.

Parameters, gradients and states are there all the time. Everything else has a lifetime on one line of 2n moments, the
n nodes of the rank's program forward and then backward: a value lives until its last reader, or, where autograd keeps
it (`autotp.cost.saved_tensors`), until the backward of the first operator that keeps it; its gradient from the
backward of its last reader until that of its maker. Views share the memory of what they view, so a value kept by
several counts once. The peak is the fullest moment. Not counted: what the allocator loses, workspaces of kernels and
collectives, and what an optimizer's step needs for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.comm import conversions
from autotp.ir.graph import Value, resolve, short_name, tensors
from autotp.ir.layouts import Layout
from autotp.ir.op import Op, aten
from autotp.ir.parts import GraphPart
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path

from .objective import Objective
from .prices import nbytes, sizer
from .saved_tensors import Saved, saved_by

STEADY = ("parameter", "buffer", "constant")  # leaves that are held all the time


Hints = Mapping[Any, int]


def measure(
    planned: Planned, sharded: Sharded, found: Iterable[GraphPart], objective: Objective, hints: Hints, cached: Hints
) -> Memory:
    """The memory of a planned and rewritten model.

    Args:
        planned: the graph with its decisions; `sharded`: the program of one rank.
        found: the named parts of the graph: the attentions among them keep a cache.
        objective: what the plan is for.
        hints: sizes to count with; `cached`: those of the cache, the same but for decoding.
    """
    line = _Line(planned, sharded, objective, hints)
    parameters = buffers = gradients = states = 0.0
    for leaf in planned.program.leaves:
        if leaf.kind not in STEADY or not tensors(leaf.node):
            continue
        val = leaf.node.meta["val"]
        held = line.size((leaf.node, 0), planned.decisions[leaf.node].outs[0])
        if leaf.kind != "parameter":
            buffers += held
            continue
        parameters += held
        with_all = objective.held(held, val)
        gradients += held if with_all > held else 0.0
        states += max(with_all - 2 * held, 0.0)
    kept, most, node, phase = line.peak()
    cache = 0.0 if objective.training else sum(_cache(f, planned, line, cached) for f in found)
    return Memory(
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        states=states,
        activations=kept,
        cache=cache,
        working=most - kept,
        phase=phase,
        at=_place(node),
        optimizer=objective.optimizer,
    )


def lifetimes(planned: Planned, sharded: Sharded, objective: Objective, hints: Hints) -> tuple[float, float]:
    """Bytes that autograd keeps, and bytes at the fullest moment beside what is steady, for these sizes."""
    return _Line(planned, sharded, objective, hints).peak()[:2]


def _cache(found: GraphPart, planned: Planned, line: _Line, hints: Hints) -> float:
    """Keys of an attention as a rank has them, and as many values; an encoder's are not kept."""
    if found.heads is None or _sees_all(planned.ops[found.heads.at[0]]):
        return 0.0
    node, slot, _ = found.heads.kv_at
    key = resolve(planned.ops[node].slots[slot])
    val = tensors(key[0])[key[1]]
    return 2 * nbytes(val, sizer(hints)) * line.share(planned.decisions[node].ins[slot])


def _sees_all(op: Op) -> bool:
    """Whether it is a fused attention in which every token sees every other: no mask of pairs of tokens."""
    if getattr(op.target, "overloadpacket", None) is not aten.scaled_dot_product_attention or op.args["is_causal"]:
        return False
    mask = op.args["attn_mask"]
    sides = mask.meta["val"] if mask is not None else None
    flat = sides is None or 0 in sides.stride()[-2:] or 1 in sides.shape[-2:]  # the same for all queries, or all keys
    return flat and op.ins[0][-2] == op.ins[1][-2]


def _place(node: fx.Node | None) -> str:
    if node is None:
        return ""
    path = node.meta.get("path") or module_path(node)
    name = "output" if node.op == "output" else node.name if node.op == "placeholder" else short_name(node.target)
    return " ".join(filter(None, [path[-1] if path else "", f"({name})"]))


class _Line:
    """The lifetimes of everything in a rank's program."""

    def __init__(self, planned: Planned, sharded: Sharded, objective: Objective, hints: Hints) -> None:
        self.planned, self.sharded, self.hint, self.training = planned, sharded, sizer(hints), objective.training
        self.example = sizer(planned.program.hints)
        self.nodes = list(sharded.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.steady = {leaf.node for leaf in planned.program.leaves if leaf.kind in STEADY}
        self.sizes: dict[tuple[fx.Node, int, Layout], float] = {}
        self.shares: dict[Layout, float] = {}
        self.held = {(v, sharded.layouts[n]): n for n, v in sharded.origin.items() if n in self.order}
        self.base: dict[fx.Node, fx.Node] = {}
        for n in self.nodes:
            if n in sharded.origin:
                self.base[n] = self._memory(n)

    def share(self, layout: Layout) -> float:
        if layout not in self.shares:
            self.shares[layout] = layout.share(self.planned.tp, self.hint)
        return self.shares[layout]

    def size(self, value: Value, layout: Layout) -> float:
        """Bytes that a rank holds of a value; equal values of equal blocks are counted once."""
        key = self.planned.same.get(value[0], value[0]), value[1], layout
        if key not in self.sizes:
            self.sizes[key] = nbytes(tensors(value[0])[value[1]], self.hint) * self.share(layout)
        return self.sizes[key]

    def saved(self, node: fx.Node) -> Saved:
        return saved_by(self.planned.ops[self.planned.same[node]], self.planned.grads)

    def operand(self, node: fx.Node, slot: int) -> fx.Node | None:
        """The program's node that an operator reads in this slot."""
        layout = self.planned.decisions[node].ins[slot]
        return self.held.get((resolve(self.planned.ops[node].slots[slot]), layout))

    def _memory(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one's value lies in."""
        old, index = self.sharded.origin[node]
        source: fx.Node | None = None
        if "conversion" in node.meta:
            kind = conversions.kind_of(*node.meta["conversion"])
            if kind.primitive is None and kind.pre is kind.post:
                source = node.args[0]  # type: ignore[assignment]
        elif old in self.planned.ops:
            slot = dict(self.saved(old).views).get(index)
            source = self.operand(old, slot) if slot is not None else None
        return self.base.get(source, node) if source is not None else node

    def peak(self) -> tuple[float, float, fx.Node | None, str]:
        """Bytes that autograd keeps, bytes at the fullest moment, its node and its direction."""
        n = len(self.nodes)
        keeper, extras = self._kept() if self.training else ({}, [])
        changes = [0.0] * (2 * n + 1)
        kept = 0.0
        for start, size in extras:
            kept += size
            _add(changes, start, 2 * n - 1 - start, size)
        last = self._last_reads()
        for node in (b for b in dict.fromkeys(self.base.values()) if not self._steady(b)):
            size, start = self.size(self.sharded.origin[node], self.sharded.layouts[node]), self.order[node]
            if node in keeper:
                kept += size
            _add(changes, start, 2 * n - 1 - keeper[node] if node in keeper else last.get(node, start), size)
        if self.training:
            self._gradients(changes)
        levels = list(itertools.accumulate(changes))[: 2 * n if self.training else n]
        if not levels:
            return 0.0, 0.0, None, "forward"
        at = max(range(len(levels)), key=lambda i: (round(levels[i]), -i))
        return kept, levels[at], self.nodes[at if at < n else 2 * n - 1 - at], "forward" if at < n else "backward"

    def _steady(self, node: fx.Node) -> bool:
        return self.sharded.origin[node][0] in self.steady

    def _last_reads(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            for read in node.all_input_nodes:
                if read in self.base:
                    last[self.base[read]] = i
        return last

    def _kept(self) -> tuple[dict[fx.Node, int], list[tuple[int, float]]]:
        """The first operator that keeps each memory, and (moment, bytes) of what operators keep of their own."""
        keeper: dict[fx.Node, int] = {}
        extras: list[tuple[int, float]] = []
        for old in self.planned.ops:
            held = self._results(old)
            if old not in self.planned.grads or not held:
                continue
            saved, moment = self.saved(old), min(self.order[n] for n in held.values())
            nodes = [self.operand(old, s) for s in saved.slots] + [held.get(i) for i in saved.results]
            for node in (self.base[x] for x in nodes if x is not None):
                keeper[node] = min(keeper.get(node, moment), moment)
            extras += [(moment, size * self._part(old, like)) for size, like in saved.extra]
        return {b: m for b, m in keeper.items() if not self._steady(b)}, extras

    def _results(self, old: fx.Node) -> dict[int, fx.Node]:
        outs = self.planned.decisions[old].outs
        found = {i: self.held.get(((old, i), layout)) for i, layout in enumerate(outs)}
        return {i: n for i, n in found.items() if n is not None}

    def _part(self, old: fx.Node, like: int | None) -> float:
        """What a rank has of an operator's own memory, for these sizes instead of the example's."""
        decision, op = self.planned.decisions[old], self.planned.ops[old]
        layouts, values = [*decision.ins, *decision.outs], [*(s.meta["val"] for s in op.slots), *tensors(old)]
        val = tensors(old)[0] if like is None else values[like]
        part = min(map(self.share, layouts)) if like is None else self.share(layouts[like])
        example = nbytes(val, self.example)
        return part * nbytes(val, self.hint) / example if example else part

    def _gradients(self, changes: list[float]) -> None:
        """The gradients of everything but parameters, whose gradients are steady."""
        n, readers = len(self.nodes), {}
        graded = {x for x in self.base if self.sharded.origin[x][0] in self.planned.grads}
        for i, node in enumerate(self.nodes):
            if node in graded or node.op == "output":
                readers |= {self.base[x]: i for x in node.all_input_nodes if x in graded}
        for node, reader in readers.items():
            if not self._steady(node):
                size = self.size(self.sharded.origin[node], self.sharded.layouts[node])
                _add(changes, 2 * n - 1 - reader, 2 * n - 1 - self.order[node], size)


def _add(changes: list[float], start: int, end: int, size: float) -> None:
    changes[start] += size
    changes[end + 1] -= size


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest rank holds.

    Attributes:
        parameters, buffers: of the rank's parts; buffers with the constants of the graph.
        gradients, states: of parameters, and the optimizer's (`Objective.optimizer`); 0 for inference.
        activations: what autograd keeps from the forward for the backward; 0 for inference.
        cache: keys and values of every attention, for as many tokens as the example inputs have; 0 for training, and
            for an attention in which every token sees every other (a fused one; others count).
        working: what lives at the fullest moment beside all that.
        peak: the sum; `phase`: "forward" or "backward", `at`: module and operator of the fullest moment.
        optimizer: whose states these are.
    """

    parameters: float = 0.0
    buffers: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    activations: float = 0.0
    cache: float = 0.0
    working: float = 0.0
    phase: str = "forward"
    at: str = ""
    optimizer: str = "adamw"

    @property
    def peak(self) -> float:
        return self.steady + self.activations + self.working

    @property
    def steady(self) -> float:
        """What is held whatever runs: all but activations and the working set."""
        return self.parameters + self.buffers + self.gradients + self.states + self.cache
