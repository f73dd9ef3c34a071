"""The memory of a rank: parameters, gradients, optimizer states, activations over time, keys and values of a cache.

Parameters, gradients and states are there all the time. Everything else has a lifetime on one line of 2n moments, the
n nodes of the rank's program forward and then backward: a value lives until its last reader, or, where autograd keeps
it (`autotp.cost.saved_tensors`), until the backward of the first operator that keeps it; its gradient from the
backward of its last reader until that of its maker. Views share the memory of what they view, so a value kept by
several counts once. The peak is the fullest moment. Not counted: what the allocator loses, workspaces of kernels and
collectives, and what an optimizer's step needs for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, cached_property
from typing import NamedTuple

from torch import fx

from autotp.comm import conversions
from autotp.ir.graph import Value, placed_outputs, resolve, short_name, tensor_at, tensors
from autotp.ir.layouts import Layout
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path, moved_to

from .cache import Cache
from .objective import Objective
from .prices import NO_PARTS, Hints, lengths, nbytes, sizer
from .saved_tensors import Keepers
from .terms import Memory

Moments = dict[fx.Node, int]

NodeBytes = list[tuple[fx.Node, float]]


def measure(
    planned: Planned, sharded: Sharded, objective: Objective, hints: Hints, cache: Cache, rank: int | None = None
) -> Memory:
    """The memory of a planned and rewritten model.

    Args:
        planned: the graph with its decisions; `sharded`: the program of one rank.
        objective: what the plan is for. hints: sizes to count with. cache: what a rank holds of one.
        rank: which; None for the fullest.
    """
    line = _line(planned, sharded, objective, hints, rank)
    parameters = buffers = gradients = states = 0.0
    for leaf in planned.program.leaves:
        if not leaf.kind.steady or not tensors(leaf.node):
            continue
        size = line.size((leaf.node, 0), planned.decisions[leaf.node].outs[0])
        if not leaf.kind.trained:
            buffers += size
            continue
        parameters += size
        # A frozen parameter takes its own bytes alone; one of plain SGD its own and its gradient's, and no states.
        budget = objective.budget_bytes(size, leaf.node.meta["val"])
        gradients += size if budget > size else 0.0
        states += max(budget - 2 * size, 0.0)
    activations, most, node, phase = line.peak()
    return Memory(
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        states=states,
        activations=activations,
        cache=cache.bytes,
        cache_token=cache.token,
        cache_sequence=cache.sequence,
        working=most - activations,
        phase=phase,
        at=_place(node),
        optimizer=objective.optimizer,
    )


def lifetimes(planned: Planned, sharded: Sharded, objective: Objective) -> Callable[[Hints], tuple[float, float]]:
    """A function of sizes: bytes that autograd keeps, and bytes at the fullest moment beside what is steady."""
    return lambda hints: _line(planned, sharded, objective, hints).peak()[:2]


class LineBytes(NamedTuple):
    """Bytes by node of the program of one rank.

    Attributes:
        savings: of nodes whose values autograd keeps, or which keep something of their own.
        working: of nodes in their order and backwards, what lives then beside what is steady or kept.
        inputs: of each part what it reads of the rest and has a gradient.
    """

    savings: NodeBytes
    working: NodeBytes
    inputs: list[NodeBytes]


def line_bytes(
    planned: Planned, sharded: Sharded, objective: Objective, hints: Hints, parts: Iterable[Collection[fx.Node]]
) -> LineBytes:
    """Return what the nodes of the program of one rank hold over a step.

    Args:
        planned, sharded, objective, hints: as for `measure`. parts: nodes of the program, whose inputs are asked for.
    """
    line = _line(planned, sharded, objective, hints)
    # Kept values, and what operators keep beside (masks, statistics): both are there until the backward comes by.
    savings = [(node, line.size(sharded.origin[node], sharded.layouts[node])) for node in line.savers[0]]
    savings += [(line.nodes[moment], size) for moment, size in line.extras()]
    # The line runs through the nodes and back; in inference it ends after the forward, where `zip` stops.
    both = [*line.nodes, *reversed(line.nodes)]
    working = list(zip(both, line.levels([life for life in line.lives() if not life.kept]), strict=False))
    # Only what carries a gradient must be kept to compute a block again; a mask is made anew.
    inputs = []
    for nodes in parts:
        read = (x for n in nodes for x in n.all_input_nodes if x not in nodes and x.op != "placeholder")
        values = [(x, sharded.origin[x]) for x in dict.fromkeys(read) if x in sharded.origin]
        inputs.append([(x, line.size(v, sharded.layouts[x])) for x, v in values if v[0] in planned.grads])
    return LineBytes(savings, working, inputs)


def _place(node: fx.Node | None) -> str:
    if node is None:
        return ""
    path = moved_to(node) or module_path(node)
    name = node.name if node.op == "placeholder" else short_name(node.target)  # of an output node "output"
    return " ".join(filter(None, [*path[-1:], f"({name})"]))


def _line(planned: Planned, sharded: Sharded, objective: Objective, hints: Hints, rank: int | None = None) -> _Line:
    """Lifetimes of a program, counted with these sizes; the program is read once."""
    if sharded.lifetimes is None or sharded.lifetimes.training != objective.training:
        sharded.lifetimes = _Line(planned, sharded, objective.training)
    return sharded.lifetimes.resized(hints, rank)


class _Life(NamedTuple):
    """First and last moment and bytes of a value, and whether it is kept for the backward."""

    start: int
    end: int
    size: float
    kept: bool


class _Line:
    """The lifetimes of everything in a rank's program."""

    def __init__(self, planned: Planned, sharded: Sharded, training: bool) -> None:
        self.planned, self.sharded, self.training = planned, sharded, training
        self.saved = Keepers(planned.ops, planned.same, planned.grads).saved
        self.example = sizer(planned.program.hints)
        self.nodes = list(sharded.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.steady = {leaf.node for leaf in planned.program.leaves if leaf.kind.steady}
        self.state_outputs = {
            resolve(n) for i, n in placed_outputs(planned.program) if planned.program.becomes(i) is not None
        }
        self.copies = {(v, sharded.layouts[n]): n for n, v in sharded.origin.items() if n in self.order}
        self.numbers: dict[tuple[fx.Node, int, Layout], int] = {}
        self.sized: list[tuple[Value, Layout]] = []
        self.base: dict[fx.Node, fx.Node] = {}
        for n in self.nodes:
            if n in sharded.origin:
                self.base[n] = self._memory(n)

    def resized(self, hints: Hints, rank: int | None = None) -> _Line:
        """Count the lifetimes with these sizes, on this rank; None for the fullest."""
        tokens = lengths(self.planned.program)
        self.hint = sizer(hints)
        self.whole = sizer({**hints, **{s: self.planned.program.hints[s] for s in tokens}})
        self.share = cache(lambda layout: layout.part(rank, self.planned.tp, self.hint))
        self.size_of, self.extra_part = cache(self._size), cache(self._extra_part)
        return self

    def size(self, value: Value, layout: Layout) -> float:
        """Bytes that a rank holds of a value; equal values of equal blocks are counted once."""
        return self.size_of(self._number(value, layout))

    def _number(self, value: Value, layout: Layout) -> int:
        """Number of the values of this size, whatever sizes are counted with."""
        key = self.planned.same.get(value[0], value[0]), value[1], layout
        if key not in self.numbers:
            self.numbers[key] = len(self.sized)
            self.sized.append((value, layout))
        return self.numbers[key]

    def _size(self, number: int) -> float:
        (value, layout), past = self.sized[number], self.planned.past
        parts = NO_PARTS if value in past.stored else past.values.get(value, NO_PARTS)
        return nbytes(tensor_at(value), self.hint, parts, self.whole) * self.share(layout)

    def operand(self, node: fx.Node, slot: int) -> fx.Node | None:
        """The program's node that an operator reads in this slot."""
        layout = self.planned.decisions[node].ins[slot]
        return self.copies.get((resolve(self.planned.ops[node].slots[slot]), layout))

    def _memory(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one's value is stored in."""
        old, index = self.sharded.origin[node]
        source: fx.Node | None = None
        if (conversion := mark(node).conversion) is not None:
            kind = conversions.kind_of(*conversion)
            # Of heads that repeat others, those for a rank's queries are read where they repeat.
            repeats = kind.name == "part_of_copy" and (old, index) in self.planned.past.copies
            if repeats or kind.primitive is None and kind.pre is kind.post:
                source = node.args[0]  # type: ignore[assignment]
        elif old in self.planned.ops:
            slot = 0 if (old, index) in self.planned.past.copies else dict(self.saved(old).views).get(index)
            source = self.operand(old, slot) if slot is not None else None
        return self.base.get(source, node) if source is not None else node

    def peak(self) -> tuple[float, float, fx.Node | None, str]:
        """Bytes that autograd keeps, bytes at the fullest moment, its node and its direction."""
        n = len(self.nodes)
        lives = list(self.lives())
        activations, levels = sum(life.size for life in lives if life.kept), self.levels(lives)
        if not levels:
            return 0.0, 0.0, None, "forward"
        # Sums of many sizes differ by rounding, so of moments equal to a byte the first one is named.
        at = max(range(len(levels)), key=lambda i: (round(levels[i]), -i))
        if at < n:
            return activations, levels[at], self.nodes[at], "forward"
        return activations, levels[at], self.nodes[self._mirror(at)], "backward"

    def levels(self, lives: Iterable[_Life]) -> list[float]:
        """Bytes at each moment of these values and of gradients."""
        n = len(self.nodes)
        changes = [0.0] * (2 * n + 1)
        spans = [life[:3] for life in lives]
        if self.training:
            spans += [(start, end, self.size_of(number)) for start, end, number in self._gradients]
        for start, end, size in spans:
            changes[start] += size
            changes[end + 1] -= size
        return list(itertools.accumulate(changes))[: 2 * n if self.training else n]

    def lives(self) -> Iterator[_Life]:
        """Give the life of every value of the forward, and of what operators keep of their own."""
        for start, size in self.extras():
            yield _Life(start, self._mirror(start), size, True)
        for start, end, number, saved in self._values:
            yield _Life(start, end, self.size_of(number), saved)

    def extras(self) -> Iterator[tuple[int, float]]:
        """Moments and bytes of what operators keep of their own."""
        for moment, old, size, like in self.savers[1]:
            yield moment, size * self.extra_part(self.planned.same[old], like)

    @cached_property
    def _values(self) -> list[tuple[int, int, int, bool]]:
        """First and last moment of every value of the forward, number of its size, and whether it is kept."""
        savers, out = self.savers[0], []
        last = {self.base[x]: i for i, node in enumerate(self.nodes) for x in node.all_input_nodes if x in self.base}
        for node in dict.fromkeys(self.base.values()):
            if not self._steady(node):
                number, start = self._number(self.sharded.origin[node], self.sharded.layouts[node]), self.order[node]
                end = self._mirror(savers[node]) if node in savers else last.get(node, start)
                out.append((start, end, number, node in savers))
        return out

    def _mirror(self, moment: int) -> int:
        """The moment of the backward of the node that runs at this one, and the other way round."""
        return 2 * len(self.nodes) - 1 - moment

    def _steady(self, node: fx.Node) -> bool:
        origin = self.sharded.origin[node]
        return origin[0] in self.steady or origin in self.state_outputs  # what is left as a state counts as the cache

    @cached_property
    def savers(self) -> tuple[Moments, list[tuple[int, fx.Node, float, int | None]]]:
        """Memory -> moment of the first operator that saves it; of what operators keep besides (masks, statistics)
        the moment, the operator, bytes for the example's sizes, and the position of the value it is sharded with."""
        moments = {}
        extras = []
        for old in self.planned.ops if self.training else ():
            results = self._results(old)
            # Without results the rewrite dropped the call: nothing reads it, and its backward never runs.
            if old not in self.planned.grads or not results:
                continue
            saved, moment = self.saved(old), min(self.order[n] for n in results.values())
            nodes = [self.operand(old, s) for s in saved.slots]
            nodes += [results.get(i) for i in saved.results]
            # A view keeps the memory of what it views alive: q, k and v of one fused product are one memory.
            for memory in (self.base[x] for x in nodes if x is not None):
                moments[memory] = min(moments.get(memory, moment), moment)
            extras += [(moment, old, size, like) for size, like in saved.extra]
        return {memory: m for memory, m in moments.items() if not self._steady(memory)}, extras

    def _results(self, old: fx.Node) -> dict[int, fx.Node]:
        """The program's nodes of a call's results, by position."""
        outs = enumerate(self.planned.decisions[old].outs)
        return {i: self.copies[(old, i), layout] for i, layout in outs if ((old, i), layout) in self.copies}

    def _extra_part(self, old: fx.Node, like: int | None) -> float:
        """A rank's part of an operator's own memory, for these sizes instead of the example's."""
        decision, op = self.planned.decisions[old], self.planned.ops[old]
        layouts, values = [*decision.ins, *decision.outs], [*(s.meta["val"] for s in op.slots), *tensors(old)]
        val = tensors(old)[0] if like is None else values[like]
        part = min(map(self.share, layouts)) if like is None else self.share(layouts[like])
        example = nbytes(val, self.example)
        return part * nbytes(val, self.hint) / example if example else part

    @cached_property
    def _gradients(self) -> list[tuple[int, int, int]]:
        """First and last moment of the gradients of everything but parameters, whose are steady, and the size."""
        readers, out = {}, []
        graded = {x for x in self.base if self.sharded.origin[x][0] in self.planned.grads}
        for i, node in enumerate(self.nodes):
            if node in graded or node.op == "output":
                readers |= {self.base[x]: i for x in node.all_input_nodes if x in graded}
        for node, reader in readers.items():
            if not self._steady(node):
                number = self._number(self.sharded.origin[node], self.sharded.layouts[node])
                out.append((self._mirror(reader), self._mirror(self.order[node]), number))
        return out
