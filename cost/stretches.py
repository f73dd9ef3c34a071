"""From a planned program on unlike ranks to the problem of their shares: families, stretches between collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autotp.comm import conversions
from autotp.cost.solver.unit_shares import ShareProblem
from autotp.ir.graph import resolve
from autotp.ir.layouts import Layout
from autotp.ir.marks import conversion_of
from autotp.ir.program import Planned, Sharded
from autotp.ir.sizes import SYMBOL, tile_of

from .collective_costs import call_seconds
from .prices import Prices
from .terms import Cost
from .units import Works

PARTS = 32  # units of a dimension whose length is a symbol
MAX_UNITS = 128  # of a family; of a dimension with more tiles several are a unit


class Padded(NamedTuple):
    """A collective of parts of a family, which all are sent as long as the first rank's.

    Attributes:
        family: its name. primitive: of the collective. bytes: where a rank has all.
    """

    family: str
    primitive: str
    bytes: float


Item = fx.Node | Padded | None  # an operator or a weight, a collective, or bare seconds
Stretch = tuple[tuple[Item, float], ...]  # what a rank does in a row, and the part of its seconds


class Family(NamedTuple):
    """Values that are sharded alike.

    Attributes:
        length: of the smallest loop that they are sharded by; `SYMBOL` where all are symbols. units: parts of that loop
            that a rank has or has not. nodes: of them. layout: one of theirs. least: units that each rank must have.
    """

    length: int
    units: int
    nodes: set[fx.Node]
    layout: Layout
    least: int

    def shares(self, prices: Prices) -> list[float]:
        """Units of each rank now, and parts of some."""
        return [self.units * self.layout.part(rank, prices.tp, prices.hint) for rank in range(prices.tp)]

    def elements(self, units: Sequence[float]) -> tuple[int, ...]:
        """Elements of the length that each rank has; of symbols, units."""
        return tuple([round(n * max(self.length / self.units, 1)) for n in units])


def units_of(length: int) -> int:
    """Units in which a dimension is distributed: whole tiles, and of many of these several."""
    count = length // tile_of(length) if length else PARTS
    few = max(n for n in range(1, min(count, MAX_UNITS) + 1) if count % n == 0)
    return few if few >= PARTS else count


class Stretches:
    """Work of each rank between collectives, under the present shares and under others.

    Attributes:
        families: by name. problem: of their shares.
    """

    def __init__(self, planned: Planned, sharded: Sharded, prices: Prices) -> None:
        self.planned, self.sharded, self.prices = planned, sharded, prices
        self.places: dict[Any, fx.Node] = {}  # (value, layout) -> a node that makes it, or reads it, so
        self.families = self._coupled()
        self.family_of: dict[fx.Node | None, str] = {
            n: name for name, family in self.families.items() for n in family.nodes
        }
        self.now = {name: family.shares(prices) for name, family in self.families.items()}

    def _coupled(self) -> dict[str, Family]:
        """Find what must have equal shares: operators that pass a slice on as it is, and all of equal lengths."""
        roots = {}
        layouts = {}
        same, ops = self.planned.same, self.planned.ops

        # A union-find: of two that are sharded alike one stands for both, and so on.
        def root(n: fx.Node) -> fx.Node:
            while roots.setdefault(n, n) is not n:
                n = roots[n]
            return n

        # All that make or read a slice in one layout have the same shares; past a conversion shares may differ.
        for node, how in self.planned.decisions.items():
            read = zip(map(resolve, ops[node].slots if node in ops else ()), how.ins, strict=False)
            results = [((node, i), layout) for i, layout in enumerate(how.outs)]
            for (maker, i), layout in (*read, *results):
                # Heads that several ranks have alike are distributed over groups of equal ranks.
                if layout.distribution is not None and not layout.distribution.shared:
                    first = same.get(node, node)
                    layouts.setdefault(first, layout)
                    roots[root(first)] = root(self.places.setdefault((same[maker], i, layout), first))
        lengths = {}
        # The smallest loop of all that are sharded alike: a head of keys, which a column of its projection would cut.
        for node in layouts:
            factor = self.planned.split(node)
            if factor is not None and isinstance(factor.size, int):
                lengths[root(node)] = min(factor.size, lengths.get(root(node), factor.size))
        families = {}
        for node, layout in layouts.items():
            length = lengths.get(root(node), SYMBOL)
            family = families.setdefault(str(length), Family(length, units_of(length), set(), layout, int(not length)))
            family.nodes.add(node)
            factor, rule = self.planned.split(node), self.planned.rules.get(node)
            # Many kernels refuse a tensor without elements.
            if factor is not None and rule is not None and not rule.runs_without(factor):
                families[str(length)] = family._replace(least=1)
        return families

    def problem(self, memory: Sequence[float], cache_bytes: float, limits: Sequence[float]) -> ShareProblem:
        """The problem of the shares of these placements.

        Args:
            memory: bytes that each rank holds under the present shares. cache_bytes: of a unit of a cache.
            limits: of each rank.
        """
        stretches, tp = self._walk(), self.prices.tp
        tables = {name: np.zeros((len(stretches), tp, family.units + 1)) for name, family in self.families.items()}
        whole = np.zeros((len(stretches), tp))
        for s, items in enumerate(stretches):
            for item, weight in items:
                name = item.family if isinstance(item, Padded) else self.family_of.get(item)
                if item is None:
                    whole[s] += weight
                elif name is None:
                    whole[s] += weight * self.seconds(item, (None,))[:, 0]
                else:
                    count = self.families[name].units
                    tables[name][s] += weight * self.seconds(item, tuple(n / count for n in range(count + 1)))
        sizes = self._bytes(cache_bytes)
        base = np.array(memory) - sum(size * np.array(self.now[name]) for name, size in sizes.items())
        least = {name: family.least for name, family in self.families.items()}
        return ShareProblem(least, tables, whole, np.array([*stretches.values()]), base, np.array(limits, float), sizes)

    def _walk(self) -> dict[Stretch, int]:
        """List the collectives of a step, what is done between two of them, forward and backward, and how often."""
        training = self.prices.objective.training
        counts, calls = Counter[Stretch](), list[tuple[Item, float]]()
        works = [*Works(self.planned, self.prices).walk(self.sharded)]
        for way in (0, 1) if training else (0,):
            here = []
            for node, origin, work in works:
                seconds, call = work.directions[way]
                if call is None and seconds:
                    part = seconds / work.seconds
                    here.append((None, seconds) if work.change else (self.planned.same[origin], part))
                elif call is not None and node is not None:
                    calls.append(self._send(node, way, seconds))
                    counts[tuple(here)] += 1
                    here = []
            counts[tuple(here)] += 1
        if training:  # the optimizer's step, which begins when all gradients are there
            leaves = [n for n, x in self.prices.leaves.items() if x.kind.trained]
            counts[tuple((self.planned.same[n], 1.0) for n in leaves)] = 1
        return {tuple(calls): 1, **counts}

    def _send(self, node: fx.Node, way: int, seconds: float) -> tuple[Item, float]:
        """A collective of parts of a family, or the seconds of one that has none."""
        origin, i = self.sharded.origin[node]
        src, dst, nbytes = self.prices.ways((origin, i), *conversion_of(node))[way]
        primitive, _, ranks = conversions.sending(src, dst, nbytes, self.prices.tp)
        side = {"all_gather": src, "reduce_scatter": dst, "all_to_all": dst}.get(primitive)
        nodes = [self.places.get((self.planned.same[origin], i, x)) for x in (side, side and side.dual)]
        name = next((self.family_of[n] for n in nodes if n in self.family_of), None)
        if side is None or name is None or ranks < self.prices.tp:
            return None, seconds
        return Padded(name, primitive, nbytes * ranks), 1.0

    @cache  # noqa: B019  as long as this object
    def seconds(self, item: fx.Node | Padded, parts: tuple[float | None, ...]) -> np.ndarray:
        """Seconds of an operator, of the update of a weight, or of a collective, [ranks, parts].

        Args:
            parts: that a rank may have of every sharded dimension; None: as it is.
        """
        tp, rows = self.prices.tp, []
        for rank in range(tp):
            if isinstance(item, Padded):
                sizes = [item.bytes * (part or 0.0) * (rank == 0) for part in parts]
                rows.append([call_seconds(item.primitive, size, tp, self.prices.cluster) for size in sizes])
            else:
                rows.append([self.prices.seconds(self._cost(item, self.prices.on(rank, part))) for part in parts])
        return np.array(rows)

    def _cost(self, node: fx.Node, prices: Prices) -> Cost:
        """Cost of an operator or a weight."""
        how = self.planned.decisions[node]
        if node in self.planned.ops:
            return prices.operator(self.planned.ops[node], how.ins, how.outs, self.planned.split(node))
        return prices.weight(node.meta["val"], how.outs[0], self.prices.leaves[node].kind.weight)

    def _bytes(self, cache_bytes: float) -> dict[str, float]:
        """Bytes of a unit of each family: of weights with gradients and states, what autograd keeps, a cache."""
        sizes = dict.fromkeys(self.families, 0.0)
        for node in self.planned.decisions:
            first = self.planned.same.get(node, node)
            if (name := self.family_of.get(first)) is not None and node.op != "output":
                most, least = (self._cost(first, self.prices.on(0, part))["budget_bytes"] for part in (1.0, 0.0))
                sizes[name] += (most - least) / self.families[name].units
        if (name := self.cached) is not None:
            sizes[name] += cache_bytes
        return sizes

    @property
    def cached(self) -> str | None:
        """The family of what a cache holds; None where it is whole on every rank."""
        readers = [n for n, op in self.planned.ops.items() if "scaled_dot_product_attention" in str(op.target)]
        return next((self.family_of[n] for n in readers if n in self.family_of), None)
