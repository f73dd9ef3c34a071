"""Costs of a planned program by operator and by unit: one walk over the program of one rank.

A unit is a stretch of the program that a pipeline never cuts: a repeated block with what follows it. Its block is
counted separately, for it may be computed again. All is of one micro-batch as large as the example inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from autotp.comm import conversions
from autotp.ir.graph import short_name, tensor_at, tensors
from autotp.ir.marks import BatchConversion, conversion_of, mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import scope_path

from .memory import line_bytes
from .prices import BACKWARD, Prices


class Call(NamedTuple):
    """A collective, the bytes of all that it is of, and among how many ranks; 0 for those of the axis."""

    primitive: str
    bytes: float
    ranks: int = 0


class Way(NamedTuple):
    """Seconds of one direction, forward or backward, and the collective where it communicates."""

    seconds: float = 0.0
    call: Call | None = None

    @property
    def primitive(self) -> str | None:
        """The collective's name."""
        return self.call and self.call.primitive


@dataclass(frozen=True)
class Work:
    """An operator or a conversion of one rank, and the seconds that it takes by the cost model.

    Attributes:
        name: of the operator ("aten.linear"), or of the conversion ("f_star").
        directions: what it does in the forward, and in the backward. launches: the part of both in which kernels are
            started. change: of a conversion, the layouts; `bytes`: the whole size of its value.
    """

    name: str
    directions: tuple[Way, Way]
    launches: float = 0.0
    change: str = ""
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.directions[0].seconds + self.directions[1].seconds


@dataclass
class Works:
    """Prices of every operator and conversion of a planned program; equal ones are priced once.

    Attributes:
        planned: the decisions. prices: of operators and conversions.
    """

    planned: Planned
    prices: Prices
    _works: dict[Any, Work] = field(default_factory=dict)

    def walk(self, sharded: Sharded) -> Iterator[tuple[fx.Node | None, fx.Node, Work]]:
        """Give each node of the program of one rank, the captured node that it is from, and what it takes.

        An operator without a tensor as its result has no node there: it comes last.

        Args:
            sharded: the program of one rank.
        """
        operators = dict.fromkeys(self.planned.ops)
        for node in sharded.graph.nodes:
            origin, i = sharded.origin.get(node, (None, 0))
            if origin is not None and mark(node).conversion is not None:
                yield node, origin, self.conversion(node, origin, i)
            elif origin in operators:
                del operators[origin]
                yield node, origin, self.operator(origin)
        yield from ((None, node, self.operator(node)) for node in operators)

    def operator(self, node: fx.Node) -> Work:
        """Price a captured operator."""
        first = self.planned.same[node]
        if first not in self._works:
            decision = self.planned.decisions[node]
            cost = self.prices.operator(self.planned.ops[node], decision.ins, decision.outs, self.planned.split(node))
            seconds = self.prices.seconds(cost)
            trained = node in self.planned.grads and self.prices.objective.training
            forward = seconds / (1 + BACKWARD) if trained else seconds
            launches = cost["launches"] / seconds if seconds else 0.0
            self._works[first] = Work(short_name(node.target), (Way(forward), Way(seconds - forward)), launches)
        return self._works[first]

    def across(self, node: fx.Node, over: BatchConversion) -> Work:
        """Price a conversion over an axis beside tp by direction, which the solver has as one operator.

        Args:
            node: the captured operator. over: the conversion that it is.
        """
        share = self.prices.share(self.planned.decisions[node].outs[0])
        ways = self.prices.across(self.planned.ops[node], over, share)
        forward, backward = (*(_way(*way, over.ranks) for way in ways), Way())[:2]
        return Work(short_name(node.target), (forward, backward))

    def conversion(self, node: fx.Node, origin: fx.Node, i: int) -> Work:
        """Price a conversion.

        Args:
            node: in the program of one rank. origin: the captured node whose result `i` it converts.
        """
        a, b = conversion_of(node)
        key = self.planned.same[origin], i, a, b
        if key not in self._works:
            tp, size = self.planned.tp, self.prices.bytes(tensor_at((origin, i)))
            ways = self.prices.step_ways((origin, i), a, b)
            sides = [_way(self.prices.one_way(*way) or 0.0, *conversions.sending(*way, tp), tp) for way in ways]
            forward, backward = (*sides, Way())[:2]
            name = conversions.kind_of(a, b).name
            self._works[key] = Work(name, (forward, backward), 0.0, f"{a} -> {b}", size)
        return self._works[key]


def _way(seconds: float, name: str, size: float, ranks: int, of: int) -> Way:
    """A direction that sends so much among so many ranks of an axis; nothing where its collective is "none"."""
    few = ranks if ranks < of else 0
    return Way(seconds, Call(name, size, few) if name != "none" else None)


@dataclass
class Direction:
    """A unit's part in the forward or in the backward.

    Attributes:
        kernels: seconds of kernels; `launches`: of starting them. calls: collectives over tp, and how often; `across`:
            likewise over an axis beside it, which the program itself has.
    """

    kernels: float = 0.0
    launches: float = 0.0
    calls: Counter[Call] = field(default_factory=Counter)
    across: Counter[Call] = field(default_factory=Counter)


@dataclass
class Load:
    """A part of a unit.

    Attributes:
        forward, backward: what it does in each direction. seconds: of both, where nothing hides a collective.
        kept_bytes: that autograd keeps. again: seconds, and `saved` bytes, if what is gathered is gathered again, by
            the calls `gathers`.
    """

    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=Direction)
    seconds: float = 0.0
    kept_bytes: float = 0.0
    again: float = 0.0
    saved: float = 0.0
    gathers: Counter[Call] = field(default_factory=Counter)

    def add(self, work: Work, across: bool) -> None:
        """Count an operator or a conversion.

        Args:
            work: what it takes. across: it converts over an axis beside tp.
        """
        self.seconds += work.seconds
        for direction, (seconds, call) in zip((self.forward, self.backward), work.directions, strict=True):
            if call is not None:
                (direction.across if across else direction.calls)[call] += 1
            else:
                direction.kernels += (1 - work.launches) * seconds
                direction.launches += work.launches * seconds


@dataclass
class UnitCost:
    """A unit: its block, and what is around it, such as an embedding or a head.

    Attributes:
        weights, gradients, states: bytes on a tp rank. experts: of its weights, those distributed over ep.
        optimizer: seconds of its step.
        inputs: bytes that the block reads of what is before it, which flow between stages too.
        working: bytes of the fullest moment beside what is steady or kept.
    """

    block: Load = field(default_factory=Load)
    rest: Load = field(default_factory=Load)
    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    experts: float = 0.0
    optimizer: float = 0.0
    inputs: float = 0.0
    working: float = 0.0


class Unit(NamedTuple):
    """A stretch of a program that is never cut: a repeated block with what follows it.

    Attributes:
        name: path of the block. start: position of its first node in the graph; that of the first unit is 0, so that
            what comes before all blocks is in it.
    """

    name: str
    start: int


class UnitCosts:
    """Costs of a planned program by unit.

    Attributes:
        units: in order. tied: weights of several units: bytes with gradient and states, and the units.
        saved_bytes: that autograd keeps, by node.
    """

    def __init__(self, planned: Planned, sharded: Sharded, prices: Prices, spans: Sequence[Unit]) -> None:
        self.planned, self.sharded, self.prices = planned, sharded, prices
        starts = [u.start for u in spans]
        graph = enumerate(sharded.graph.nodes)
        self._place = {n: bisect_right(starts, i) - 1 for i, n in graph if n.op != "placeholder"}
        self.units = tuple(UnitCost() for _ in spans)
        self._inner: list[set[fx.Node]] = [set() for _ in spans]
        for node, at in self._place.items():
            if spans[at].name in scope_path(node):
                self._inner[at].add(node)
        works = Works(planned, prices)
        for node, origin, work in works.walk(sharded):
            over = mark(origin).batch
            load = self.load(node) if node is not None else self.units[-1].rest
            load.add(work if over is None else works.across(origin, over), over is not None)
        self.tied = tuple(self._weights())
        self._activations()

    def home(self, node: fx.Node) -> int:
        """Return the unit of a value; of an input that of its first reader."""
        if node in self._place:
            return self._place[node]
        return min((self._place[u] for u in node.users if u in self._place), default=0)

    def load(self, node: fx.Node) -> Load:
        """Return the part of a unit that a node counts in."""
        at = self.home(node)
        return self.units[at].block if node in self._inner[at] else self.units[at].rest

    def _weights(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Count each weight in its first unit, and give those of several."""
        heads = self.sharded.graph.find_nodes(op="placeholder")
        for leaf, node in zip(self.planned.program.leaves, heads, strict=True):
            if not leaf.kind.trained or not tensors(leaf.node):
                continue
            cost = self.prices.weight(leaf.node.meta["val"], self.planned.decisions[leaf.node].outs[0], True)
            size, budget = cost["parameter_bytes"], cost["budget_bytes"]
            places = tuple(sorted({self._place[u] for u in node.users if u in self._place})) or (0,)
            unit = self.units[places[0]]
            unit.weights += size
            unit.gradients += size if budget > size else 0.0
            unit.states += max(budget - 2 * size, 0.0)
            unit.optimizer += cost["optimizer"]
            unit.experts += size * (leaf.name in self.planned.program.owned)
            if len(places) > 1:
                yield budget, places

    def _activations(self) -> None:
        """Count what autograd keeps, what works beside it, and what flows into each block."""
        line = line_bytes(self.planned, self.sharded, self.prices.objective, self.prices.hints, self._inner)
        self.saved_bytes = dict(line.savings)
        for node, size in line.savings:
            self.load(node).kept_bytes += size
        for node, size in line.working:
            unit = self.units[self.home(node)]
            unit.working = max(unit.working, size)
        for at, inputs in enumerate(line.inputs):
            self.units[at].inputs = sum(size for node, size in inputs if self.home(node) <= at)
