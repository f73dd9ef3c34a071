"""A step on a mesh, priced from the costs of a plan's units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from autotp.cost import Cluster
from autotp.cost.meshes import Mesh, Sends, boundary_sends, bubble, collective_sends, weight_sends
from autotp.cost.units import Call, Unit, UnitCost, UnitCosts
from autotp.passes.stages.balance import divide, in_flight, units_of
from autotp.plans.describe.describe import gathered_again

from .shares import Staged
from .staging import weigh

Machines = tuple[Sequence[float], Sequence[float]]  # bytes that each place may hold, and how fast it is

Array = np.ndarray
SPLIT = ("weights", "gradients", "states")  # over dp and cp, by `fully_shard`


@dataclass(frozen=True)
class Terms:
    """Costs of a model planned for degrees of tp and cp, of one rank.

    Attributes:
        units: in order. tied: weights of several units: bytes with gradient and states, and the units.
        exposed_share: part of the communication over tp that nothing hides.
        flops: of the whole model's forward.
    """

    units: tuple[UnitCost, ...]
    tied: tuple[tuple[float, tuple[int, ...]], ...]
    exposed_share: float
    flops: float


def terms_of(staged: Staged) -> Terms:
    """Return the terms of a plan, with the savings of gathering again in the backward."""
    plan, planned, sharded, prices = staged.plan, staged.planned, staged.sharded, staged.builder.prices
    costs = UnitCosts(planned, sharded, prices, units_of(planned, sharded) or [Unit("", 0)])
    for node, size, seconds in gathered_again(planned, sharded, staged.builder):
        load = costs.load(node)
        load.again += seconds
        load.gathers[Call("all_gather", size)] += 1
        load.saved += costs.saved_bytes.get(node, 0.0) * (1 - 1 / plan.tp)
    totals = plan.totals
    exposed_share = totals.exposed / totals.communication if totals.communication else 1.0
    return Terms(costs.units, costs.tied, exposed_share, totals.flops)


class UnitSums(NamedTuple):
    """Costs of each unit for a micro-batch: seconds, and bytes that are sent, kept, and work."""

    compute: Array
    again: Array
    tp: Array
    cp: Array
    backward: Array  # seconds of kernels beside which gradients are sent
    tp_sent: Array
    cp_sent: Array
    kept_bytes: Array
    working: Array
    inputs: Array


class RankSums(NamedTuple):
    """Costs of the ranks of a pipeline for a micro-batch.

    Attributes:
        means: seconds by part, on average over them. total: of each. backward: of each, of kernels of the backward.
        tp_sent, cp_sent: bytes, on average. inputs: bytes that flow between stages.
        kept_bytes: bytes of each stage. working: of each rank.
    """

    means: dict[str, float]
    total: Array
    backward: Array
    tp_sent: float
    cp_sent: float
    inputs: float
    kept_bytes: Array
    working: Array


class Priced(NamedTuple):
    """A step: its parts by the names of `autotp.plans.choices.TIMES`, bytes sent by axis, bytes held, and whether each
    rank has memory for them."""

    times: dict[str, float]
    sends: dict[str, float]
    memory: float
    fits: bool

    @property
    def seconds(self) -> float:
        return sum(self.times.values())


@dataclass
class Pricer:
    """Prices meshes of one degree of tp and one of cp.

    Attributes:
        terms: of the plan. cluster: the machines. example: examples of the micro-batch that was planned.
        machines: by pp, bytes that each place of a pipeline may hold, and how fast it is; where it says nothing, all
            hold any and are as fast as planned.
    """

    terms: Terms
    cluster: Cluster
    example: int
    machines: Callable[[int], Machines] = lambda pp: ((), ())

    def __post_init__(self) -> None:
        self._sums: dict[object, UnitSums] = {}
        self._ranks: dict[object, RankSums] = {}
        self.starts, self.price = cache(self._division), cache(self._step)  # a search asks for a mesh again
        self._sends: dict[object, list[Sends]] = {}

    @cached_property
    def steady(self) -> dict[str, Array]:
        """Bytes of weights, gradients and states of every unit, and seconds of the optimizer's step."""
        return {
            name: np.array([getattr(u, name) for u in self.terms.units])
            for name in ("weights", "gradients", "states", "experts", "optimizer")
        }

    @cached_property
    def first(self) -> list[int]:
        """Index of the first unit that is equal, for every unit."""
        return [self.terms.units.index(unit) for unit in self.terms.units]

    def _step(self, mesh: Mesh) -> Priced:
        """Price a step on a mesh.

        Every rank of the pipeline works through all micro-batches, the slowest sets the pace, and (pp - 1) / chunks
        micro-batches more fill and drain it. What dp sends runs beside the backward of one micro-batch.
        """
        sums, m = self.ranks(mesh), mesh.microbatches
        boundary = boundary_sends(mesh, sums.inputs, self.cluster)
        slowest, mean = float(sums.total.max()), float(sums.total.mean())
        step = {name: m * seconds for name, seconds in sums.means.items()}
        step |= {
            "pp": m * boundary.seconds,
            "uneven": m * (slowest - mean),
            "bubble": m * (slowest + boundary.seconds) * bubble(mesh.pp, mesh.chunks, m),
        }
        waits, updates, dp_sent = self._updates(mesh, sums.backward)
        last = (waits + updates).argmax()
        step |= {"dp": float(waits[last]), "optimizer": float(updates[last])}
        nbytes, limits = self._memory(mesh, sums), self.machines(mesh.pp)[0]
        sends = {"tp": m * sums.tp_sent, "cp": m * sums.cp_sent, "pp": m * boundary.bytes, "dp": dp_sent}
        return Priced(step, sends, float(nbytes.max()), bool(np.all(nbytes <= (limits or inf))))

    def ranks(self, mesh: Mesh) -> RankSums:
        """Return the costs of the ranks of a pipeline for a micro-batch."""
        key = mesh.batch, mesh.keep, mesh.pp, mesh.chunks, mesh.copies
        if key not in self._ranks:
            sums, starts = self.sums(mesh), self.starts(mesh.pp, mesh.chunks)
            rates = np.array(self.machines(mesh.pp)[1] or 1.0)
            parts = {}
            for name in ("compute", "again", "tp", "cp"):
                parts[name] = self._by_rank(mesh, getattr(sums, name)) / rates
            working = np.maximum.reduceat(sums.working, starts).reshape(mesh.chunks, mesh.pp).max(0)
            self._ranks[key] = RankSums(
                means={name: float(x.mean()) for name, x in parts.items()},
                total=np.sum(list(parts.values()), 0),
                backward=self._by_rank(mesh, sums.backward) / rates,
                tp_sent=float(self._by_rank(mesh, sums.tp_sent).mean()),
                cp_sent=float(self._by_rank(mesh, sums.cp_sent).mean()),
                inputs=float(sums.inputs.max()),
                kept_bytes=np.add.reduceat(sums.kept_bytes, starts),
                working=working,
            )
        return self._ranks[key]

    def _by_rank(self, mesh: Mesh, x: Array) -> Array:
        """Sum over the units of each rank of the pipeline."""
        stages = np.add.reduceat(x, self.starts(mesh.pp, mesh.chunks))
        return stages.reshape(mesh.chunks, mesh.pp).sum(0)

    def sums(self, mesh: Mesh) -> UnitSums:
        """Return the costs of each unit, with as many examples as on this mesh."""
        key = mesh.batch, mesh.keep, mesh.copies
        if key not in self._sums:
            rows = {i: self._unit(self.terms.units[i], mesh) for i in set(self.first)}
            self._sums[key] = UnitSums(*np.array([rows[i] for i in self.first]).T)
        return self._sums[key]

    def _division(self, pp: int, chunks: int) -> Array:
        """Return the first unit of each stage: the division whose slowest stage is fastest, with all values kept."""
        weights, (limits, rates) = weigh(self.terms.units, self.terms.tied), self.machines(pp)
        division = divide(weights, pp, chunks, [*limits] * chunks, [*rates] * chunks) if rates else None
        division = division or divide(weights, pp, chunks, (), [*rates] * chunks)
        assert division is not None
        return np.cumsum([0, *division.sizes[:-1]])

    def _unit(self, unit: UnitCost, mesh: Mesh) -> tuple[float, ...]:
        """Return a row of `UnitSums`."""
        # Kernels and bytes grow with the examples of a rank; the time of launches does not.
        part, both, block = mesh.batch / self.example, (unit.block, unit.rest), unit.block
        backward = sum(part * x.backward.kernels + x.backward.launches for x in both)
        compute = backward + sum(part * x.forward.kernels + x.forward.launches for x in both)
        ways = [way for x in both for way in (x.forward, x.backward)]
        again, extra, kept_bytes = 0.0, 0.0, part * (block.kept_bytes + unit.rest.kept_bytes)
        working = part * unit.working
        tp = self._sends_of([x.calls for x in ways], part, mesh, "tp")
        axis = "ep" if mesh.ep > 1 else "cp"
        cp = self._sends_of([x.across for x in ways], part, mesh, axis)
        # Ranks with the same experts all-gather these for a micro-batch, and reduce-scatter their gradients.
        calls = [Counter({Call(name, unit.experts, mesh.copies): 1}) for name in ("all_gather", "reduce_scatter")]
        gathers, scatters = [self._sends_of([call], 1.0, mesh, "dp") for call in calls]
        cp = cp.plus(gathers).plus(scatters)
        gathered = unit.experts * (mesh.copies > 1)
        # Slices of what was gathered are kept in its place: gathered again in the backward, smaller until then.
        if mesh.keep == "slices":
            again = part * sum(x.again for x in both)
            kept_bytes -= part * sum(x.saved for x in both)
            extra = self._sends_of([x.gathers for x in both], part, mesh, "tp").bytes
        # A block's inputs alone: its forward runs again, so that one block's values live beside what works.
        if mesh.keep == "inputs":
            repeated = self._sends_of([block.forward.calls], part, mesh, "tp")
            over_cp = self._sends_of([block.forward.across], part, mesh, axis)
            again = part * block.forward.kernels + block.forward.launches + repeated.seconds
            cp, extra = cp.plus(over_cp).plus(gathers), repeated.bytes
            kept_bytes = part * (unit.inputs + unit.rest.kept_bytes)
            working, gathered = working + part * block.kept_bytes + gathered, 0.0
        return (
            compute, again, tp.seconds, cp.seconds, backward + again,
            tp.bytes + extra, cp.bytes, kept_bytes + gathered, working, part * unit.inputs,
        )  # fmt: skip

    def _sends_of(self, calls: Iterable[Counter[Call]], part: float, mesh: Mesh, axis: str) -> Sends:
        """Sum exposed seconds, and bytes, of collectives for a part of the examples that were planned."""
        total = Sends()
        for (primitive, size, few), times in (pair for counter in calls for pair in counter.items()):
            ranks = few or getattr(mesh, axis)
            sends = collective_sends(primitive, part * size, ranks, self.cluster, mesh.stride(axis))
            total = total.plus(Sends(times * sends.seconds, times * sends.bytes))
        return total._replace(seconds=total.seconds * self.terms.exposed_share) if axis == "tp" else total

    def _updates(self, mesh: Mesh, backward: Array) -> tuple[Array, Array, float]:
        """Return the seconds by rank of waiting for dp and of the optimizer, and the bytes that a rank sends."""
        key = mesh.fully_shard, mesh.replicas
        if key not in self._sends:
            sizes = (self.steady["weights"] - self.steady["experts"]).tolist()  # experts are sharded over dp already
            sends = {size: weight_sends(mesh, size, self.cluster) for size in set(sizes)}
            self._sends[key] = [sends[size] for size in sizes]
        seconds = self._by_rank(mesh, np.array([x.seconds for x in self._sends[key]]))
        times = mesh.microbatches if mesh.fully_shard else 1
        updates = self._by_rank(mesh, self.steady["optimizer"] * self._part(mesh))
        nbytes = times * sum(x.bytes for x in self._sends[key]) / mesh.pp
        return times * np.maximum(seconds - backward, 0.0), updates, nbytes

    def _part(self, mesh: Mesh) -> Array:
        """Return the part of each unit's weights that a rank holds: of experts always its own, of the rest what
        `fully_shard` leaves it."""
        experts = self.steady["experts"] / np.maximum(self.steady["weights"], 1.0)
        return (1 - experts) / (mesh.replicas if mesh.fully_shard else 1) + experts / mesh.copies

    def _memory(self, mesh: Mesh, sums: RankSums) -> Array:
        """Return the bytes of each rank of the pipeline: steady, kept for micro-batches in flight, and working."""
        starts = self.starts(mesh.pp, mesh.chunks)
        degree = mesh.replicas if mesh.fully_shard else 1
        rank_bytes = np.add.reduceat(np.sum([self.steady[name] for name in SPLIT], 0) * self._part(mesh), starts)
        # A tied weight is held by every stage that reads it; the first has it among its own.
        for size, places in self.terms.tied:
            homes = sorted({int(np.searchsorted(starts, p, side="right")) - 1 for p in places})
            for stage in homes[1:]:
                rank_bytes[stage] += size / degree
        rank_bytes = rank_bytes + np.minimum(_flying(mesh.pp, mesh.chunks), mesh.microbatches) * sums.kept_bytes
        # Weights that are split over dp are whole for one unit at a time.
        gathered = float(self.steady["weights"].max()) if mesh.fully_shard else 0.0
        return rank_bytes.reshape(mesh.chunks, mesh.pp).sum(0) + sums.working + gathered


@cache
def _flying(pp: int, chunks: int) -> Array:
    """Count the micro-batches in flight at each stage."""
    return np.array([in_flight(stage, pp, chunks) for stage in range(pp * chunks)])
