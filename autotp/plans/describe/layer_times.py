"""The times of one repeated block of a plan, operator by operator, by the cost model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autotp.comm import conversions
from autotp.comm.conversions import primitive
from autotp.cost.prices import BACKWARD
from autotp.ir.graph import short_name, tensors
from autotp.ir.layouts import Layout
from autotp.ir.marks import conversion_of, mark
from autotp.ir.parts import GraphPart
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path, moved_to
from autotp.passes.analysis.fold import INDEXED
from autotp.passes.shard.planner import Builder
from autotp.plans.estimates import OUTSIDE, PARTS, REST, Layer, Timed, sublayer

BlockIndex = Callable[[fx.Node], int | None]  # a conversion in the program of one rank -> index of its block
Placed = tuple[Timed, tuple[str, ...]]  # a step, and the indexed modules that it runs in, outermost first


def layer(steps: Sequence[Placed]) -> Layer:
    """Of the repeated blocks the kind in which a step spends most, and what is outside of it.

    Of that kind the times are those that most of its blocks have; kinds of which no two blocks take equal times come
    last. Where nothing repeats it is the whole model.

    Args:
        steps: of the whole model, as `Steps.walk` gives them.
    """
    inside: dict[str, list[Timed]] = defaultdict(list)
    for step, paths in steps:
        for path in paths:
            inside[path].append(step)
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path, own in inside.items():
        kinds[INDEXED.sub("", path), tuple(step.name for step in own if not step.converts)].append(path)
    repeated = [_Kind.of(paths, inside) for paths in kinds.values() if len(paths) > 1]
    if not repeated:
        whole = tuple(step for step, _ in steps)
        return Layer("", whole, 1, 1, sum(step.seconds for step in whole), sublayer(OUTSIDE, ()))
    kind = max(repeated, key=lambda kind: (kind.alike > 1, kind.total))  # of equals the first, the outermost
    apart = set(kind.paths)
    outside = sublayer(OUTSIDE, (step for step, paths in steps if apart.isdisjoint(paths)))
    return Layer(kind.typical, tuple(inside[kind.typical]), len(kind.paths), kind.alike, kind.total, outside)


@dataclass(frozen=True)
class _Kind:
    """Blocks with the same operators: `typical`, the first of those that take the times that most of them take, which
    `alike` of them do, and the seconds of all."""

    paths: Sequence[str]
    typical: str
    alike: int
    total: float

    @classmethod
    def of(cls, paths: Sequence[str], inside: Mapping[str, Sequence[Timed]]) -> _Kind:
        times = {}
        for path in paths:
            times[path] = tuple((step.name, step.forward, step.backward) for step in inside[path])
        common, alike = Counter(times.values()).most_common(1)[0]
        total = sum(step.seconds for path in paths for step in inside[path])
        return cls(paths, next(path for path in paths if times[path] == common), alike, total)


@dataclass
class Steps:
    """Prices every operator and conversion of the program of one rank.

    Attributes:
        planned: the decisions; `builder`: has the prices.
        parts: the blocks by pattern; `block`: operator -> index of its block; `place`: the same of a conversion.
    """

    planned: Planned
    builder: Builder
    parts: Sequence[GraphPart]
    block: Mapping[fx.Node, int]
    place: BlockIndex
    times: dict[Any, Timed] = field(default_factory=dict)

    def walk(self, sharded: Sharded) -> Iterator[Placed]:
        """Those that take time, in the order of the program.

        Args:
            sharded: the program of one rank.
        """
        return (placed for _, placed in self.each(sharded))

    def each(self, sharded: Sharded) -> Iterator[tuple[fx.Node | None, Placed]]:
        """The same, each with its node in the program; None for an operator without a tensor as its result."""
        operators = dict.fromkeys(self.planned.ops)
        for node in sharded.graph.nodes:
            origin = sharded.origin.get(node, (None, 0))[0]
            if mark(node).conversion is not None:
                yield from ((node, placed) for placed in self._conversion(node, sharded.origin[node]))
            elif origin in operators:
                del operators[origin]
                yield from ((node, placed) for placed in self._operator(origin))
        for node in operators:
            yield from ((None, placed) for placed in self._operator(node))

    def _operator(self, node: fx.Node) -> Iterator[Placed]:
        first = self.planned.same[node]
        if first not in self.times:
            self.times[first] = self._time(node)
        timed = self.times[first]
        if timed.seconds:
            path = module_path(node)
            part = self._part(self.block.get(node))
            yield replace(timed, module=path[-1] if path else "", part=part), _indexed(path)

    def _time(self, node: fx.Node) -> Timed:
        decision, rule, prices = self.planned.decisions[node], self.planned.rules[node], self.builder.prices
        split = rule.factors[decision.factor] if rule is not None and decision.factor is not None else None
        seconds = prices.seconds(prices.operator(self.planned.ops[node], decision.ins, decision.outs, split))
        trained = node in self.planned.grads and self.builder.objective.training
        forward = seconds / (1 + BACKWARD) if trained else seconds
        return Timed(short_name(node.target), "", "", forward, seconds - forward)

    def _conversion(self, node: fx.Node, value: tuple[fx.Node, int]) -> Iterator[Placed]:
        (origin, i), (a, b) = value, conversion_of(node)
        key = self.planned.same[origin], i, a, b
        if key not in self.times:
            self.times[key] = self._convert(origin, i, a, b)
        timed = self.times[key]
        if timed.seconds:
            index, path = self.place(node), moved_to(node)
            where = path[-1] if path else ""
            yield replace(timed, module=where, part=self._part(index)), _indexed(self._home(index) or path)

    def _convert(self, origin: fx.Node, i: int, a: Layout, b: Layout) -> Timed:
        trained = origin in self.planned.grads and self.builder.objective.training
        size = self.builder.prices.bytes(tensors(origin)[i])
        forward = self.builder.prices.one_way(a, b, size * self.builder.prices.narrow(origin, a, b)) or 0.0
        backward = self.builder.prices.one_way(b.dual, a.dual, size) or 0.0 if trained else 0.0
        sends = primitive(a, b), primitive(b.dual, a.dual) if trained else None
        name = conversions.kind_of(a, b).name
        return Timed(name, "", "", forward, backward, *sends, f"{a} -> {b}", size)

    def _home(self, index: int | None) -> tuple[str, ...]:
        """The modules that hold a block: a sum of partials is taken where it is read, in the next layer maybe."""
        if index is None:
            return ()
        paths = (module_path(n) for n in self.parts[index].nodes)
        own = self.parts[index].module
        return next((path[: path.index(own) + 1] for path in paths if own in path), ())

    def _part(self, index: int | None) -> str:
        return PARTS.get(self.parts[index].kind, REST) if index is not None else REST


def _indexed(path: Sequence[str]) -> tuple[str, ...]:
    return tuple(p for p in path if INDEXED.search(p))
