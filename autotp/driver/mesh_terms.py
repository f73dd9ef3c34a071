"""What each unit of a planned model costs, taken apart so that it can be priced on any mesh.

A unit is a repeated block with what follows it (`autotp.passes.stages.units`). Of each the block counts apart, for it
may be computed again. All is of one micro-batch as large as the example inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autotp.comm import conversions
from autotp.comm.conversions import primitive
from autotp.cost.memory import inputs_of, kept_for_backward, working_sets
from autotp.cost.meshes import Attended
from autotp.cost.prices import BACKWARD, nbytes, sizer
from autotp.ir.graph import resolve, size_hint, tensors
from autotp.ir.marks import conversion_of, mark
from autotp.ir.parts import HeadDims
from autotp.ir.scopes import module_path, scope_path
from autotp.passes.analysis.blocks import find_blocks
from autotp.passes.stages.units import Unit, units_of
from autotp.plans.describe.describe import gathered_again

from .compile import Staged

Call = tuple[str, float]  # primitive, bytes of the whole value


@dataclass
class Load:
    """What a part of a unit does.

    Attributes:
        forward, backward: seconds of kernels; `launches_forward`, `launches_backward`: of starting them.
        calls_forward, calls_backward: collectives over tp, and how often.
        kept_bytes: that autograd keeps. again: seconds, and `saved` bytes, if what is gathered is gathered again, by
            the calls `gathers`.
    """

    forward: float = 0.0
    backward: float = 0.0
    launches_forward: float = 0.0
    launches_backward: float = 0.0
    calls_forward: Counter[Call] = field(default_factory=Counter)
    calls_backward: Counter[Call] = field(default_factory=Counter)
    kept_bytes: float = 0.0
    again: float = 0.0
    saved: float = 0.0
    gathers: Counter[Call] = field(default_factory=Counter)


@dataclass
class UnitTerms:
    """A unit: its block, and what is around it, such as an embedding or a head.

    Attributes:
        weights, gradients, states: bytes on a tp rank. optimizer: seconds of its step.
        inputs: bytes that the block reads of what is before it, which flow between stages too.
        working: bytes of the fullest moment beside what is steady or kept.
        attentions: in it.
    """

    block: Load = field(default_factory=Load)
    rest: Load = field(default_factory=Load)
    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    optimizer: float = 0.0
    inputs: float = 0.0
    working: float = 0.0
    attentions: list[Attended] = field(default_factory=list)


@dataclass(frozen=True)
class Terms:
    """A model planned for a degree of tp.

    Attributes:
        units: in order. tied: weights of several units: bytes with gradient and states, and the units.
        exposed_share: part of the communication over tp that nothing hides.
        flops: of the whole model's forward.
    """

    tp: int
    units: tuple[UnitTerms, ...]
    tied: tuple[tuple[float, tuple[int, ...]], ...]
    exposed_share: float
    flops: float


def terms_of(staged: Staged) -> Terms:
    """The terms of a plan."""
    return _Reader(staged).read()


class _Reader:
    def __init__(self, staged: Staged) -> None:
        self.plan, self.planned, self.sharded, self.builder = (
            staged.plan,
            staged.planned,
            staged.sharded,
            staged.builder,
        )
        self.prices, self.objective = staged.builder.prices, staged.builder.objective
        self.spans = units_of(self.sharded.graph.nodes) or [Unit("", 0)]
        starts = [u.start for u in self.spans]
        graph = enumerate(self.sharded.graph.nodes)
        self.place = {n: bisect_right(starts, i) - 1 for i, n in graph if n.op != "placeholder"}
        self.units = [UnitTerms() for _ in self.spans]
        self.inner: list[set[fx.Node]] = [set() for _ in self.spans]
        for node, at in self.place.items():
            if self.spans[at].name in scope_path(node):
                self.inner[at].add(node)

    def read(self) -> Terms:
        self._seconds()
        tied = self._weights()
        self._activations()
        self._attentions()
        totals = self.plan.totals
        spared = totals.terms.get("hidden", 0.0) + totals.terms.get("bucketed", 0.0)
        exposed_share = 1 - spared / totals.communication if totals.communication else 1.0
        return Terms(self.plan.tp, tuple(self.units), tied, exposed_share, totals.flops)

    def _load(self, node: fx.Node) -> Load:
        at = self._home(node)
        return self.units[at].block if node in self.inner[at] else self.units[at].rest

    def _home(self, node: fx.Node) -> int:
        """The unit of a value; of an input that of its first reader."""
        if node in self.place:
            return self.place[node]
        return min((self.place[u] for u in node.users if u in self.place), default=0)

    def _seconds(self) -> None:
        operators = dict.fromkeys(self.planned.ops)
        for node in self.sharded.graph.nodes:
            if node not in self.sharded.origin:
                continue
            value = self.sharded.origin[node]
            if mark(node).conversion is not None:
                self._convert(node, *value)
            elif value[0] in operators:
                del operators[value[0]]
                self._operate(self._load(node), value[0])
        for node in operators:
            self._operate(self.units[-1].rest, node)

    def _operate(self, load: Load, node: fx.Node) -> None:
        first = self.planned.same[node]
        decision, rule = self.planned.decisions[first], self.planned.rules[first]
        split = rule.factors[decision.factor] if rule is not None and decision.factor is not None else None
        cost = self.prices.operator(self.planned.ops[first], decision.ins, decision.outs, split)
        trained = node in self.planned.grads
        part = 1 / (1 + BACKWARD) if trained else 1.0
        load.forward += part * (cost["compute"] + cost["communication"])
        load.launches_forward += part * cost["launches"]
        load.backward += (1 - part) * (cost["compute"] + cost["communication"])
        load.launches_backward += (1 - part) * cost["launches"]

    def _convert(self, node: fx.Node, origin: fx.Node, i: int) -> None:
        a, b = conversion_of(node)
        load, size = self._load(node), self.prices.bytes(tensors(origin)[i])
        ways = [(a, b, size * self.prices.narrow(origin, a, b), True)]
        if origin in self.planned.grads:
            ways.append((b.dual, a.dual, size, False))
        for src, dst, size, there in ways:
            moves = conversions.key(src, dst) in conversions.KINDS
            call = primitive(src, dst) if moves else None
            if call is not None:
                calls = load.calls_forward if there else load.calls_backward
                calls[call, size] += 1
                continue
            seconds = self.prices.one_way(src, dst, size) or 0.0
            load.forward += seconds if there else 0.0
            load.backward += 0.0 if there else seconds

    def _weights(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        tied = []
        heads = [n for n in self.sharded.graph.nodes if n.op == "placeholder"]
        for leaf, node in zip(self.planned.program.leaves, heads, strict=True):
            if not leaf.kind.trained or not tensors(leaf.node):
                continue
            val = leaf.node.meta["val"]
            cost = self.prices.weight(val, self.planned.decisions[leaf.node].outs[0], True)
            own, budget = cost["parameter_bytes"], cost["budget_bytes"]
            places = tuple(sorted({self.place[u] for u in node.users if u in self.place})) or (0,)
            unit = self.units[places[0]]
            unit.weights += own
            unit.gradients += own if budget > own else 0.0
            unit.states += max(budget - 2 * own, 0.0)
            unit.optimizer += cost["optimizer"]
            if len(places) > 1:
                tied.append((budget, places))
        return tuple(tied)

    def _activations(self) -> None:
        hints = self.prices.hints
        kept_sizes = {}
        for node, size in kept_for_backward(self.planned, self.sharded, self.objective, hints):
            self._load(node).kept_bytes += size
            kept_sizes[node] = size
        for node, size in working_sets(self.planned, self.sharded, self.objective, hints):
            unit = self.units[self._home(node)]
            unit.working = max(unit.working, size)
        for at, own in enumerate(inputs_of(self.planned, self.sharded, hints, self.inner)):
            self.units[at].inputs = sum(size for node, size in own if self._home(node) <= at)
        for node, size, seconds in gathered_again(self.planned, self.sharded, self.builder):
            load = self._load(node)
            load.again += seconds
            load.gathers["all_gather", size] += 1
            load.saved += kept_sizes.get(node, 0.0) * (1 - 1 / self.plan.tp)

    def _attentions(self) -> None:
        operators: Mapping = {n: (op, self.planned.rules[n]) for n, op in self.planned.ops.items()}
        names = {u.name: i for i, u in enumerate(self.spans)}
        for part in find_blocks(self.planned.program, self.planned.same, operators):
            if part.heads is None:
                continue
            paths = [p for n in part.nodes for p in module_path(n) if p in names]
            unit = self.units[names[paths[0]] if paths else 0]
            count, kv = (size_hint(n, self.prices.hints) for n in (part.heads.count, part.heads.kv))
            unit.attentions.append(Attended(self._bytes(part.heads.at), self._bytes(part.heads.kv_at), count, kv))

    def _bytes(self, at: HeadDims) -> float:
        """Of an operand with heads on a rank."""
        node, slot, _ = at
        key = resolve(self.planned.ops[node].slots[slot])
        hint = sizer(self.prices.hints)
        part = self.planned.decisions[node].ins[slot].share(self.plan.tp, hint)
        return nbytes(tensors(key[0])[key[1]], hint) * part
