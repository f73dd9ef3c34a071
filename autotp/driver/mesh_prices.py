"""A step on a mesh, priced from the costs of a plan's units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from autotp.cost import Cluster
from autotp.cost.collective_costs import call_seconds, collective_bytes
from autotp.cost.meshes import Attended, Mesh, Sends, boundary_sends, bubble, context_sends, weight_sends
from autotp.cost.prices import nbytes
from autotp.cost.units import Call, Unit, UnitCost, UnitCosts
from autotp.ir.graph import resolve, size_hint, tensors
from autotp.ir.program import HeadDims
from autotp.ir.scopes import module_path
from autotp.passes.stages.balance import divide, in_flight, units_of
from autotp.plans.describe.describe import gathered_again

from .compile import Staged
from .staging import weigh

Array = np.ndarray
SPLIT = {"": (), "states": ("states",), "weights": ("weights", "gradients", "states")}  # what is split over dp


@dataclass(frozen=True)
class Terms:
    """A model planned for a degree of tp.

    Attributes:
        units: in order. tied: weights of several units: bytes with gradient and states, and the units.
        exposed_share: part of the communication over tp that nothing hides.
        flops: of the whole model's forward.
    """

    tp: int
    units: tuple[UnitCost, ...]
    tied: tuple[tuple[float, tuple[int, ...]], ...]
    exposed_share: float
    flops: float


def terms_of(staged: Staged) -> Terms:
    """Return the terms of a plan: its units with their attentions, and what gathering again saves."""
    plan, planned, sharded, prices = staged.plan, staged.planned, staged.sharded, staged.builder.prices
    spans = units_of(planned, sharded) or [Unit("", 0)]
    costs = UnitCosts(planned, sharded, prices, spans)
    for node, size, seconds in gathered_again(planned, sharded, staged.builder):
        load = costs.load(node)
        load.again += seconds
        load.gathers[Call("all_gather", size)] += 1
        load.saved += costs.saved_bytes.get(node, 0.0) * (1 - 1 / plan.tp)
    names = {u.name: i for i, u in enumerate(spans)}
    for part in staged.builder.parts:
        if part.heads is not None:
            paths = [p for n in part.nodes for p in module_path(n) if p in names]
            unit = costs.units[names[paths[0]] if paths else 0]
            count, kv = (size_hint(n, prices.hints) for n in (part.heads.count, part.heads.kv))
            queries, keys = (_head_bytes(staged, at) for at in (part.heads.at, part.heads.kv_at))
            unit.attentions.append(Attended(queries, keys, count, kv))
    totals = plan.totals
    exposed_share = totals.exposed / totals.communication if totals.communication else 1.0
    return Terms(plan.tp, costs.units, costs.tied, exposed_share, totals.flops)


def _head_bytes(staged: Staged, at: HeadDims) -> float:
    """Return the bytes of an operand with heads on a rank."""
    (node, slot, _), planned, hint = at, staged.planned, staged.builder.prices.hint
    source, i = resolve(planned.ops[node].slots[slot])
    return nbytes(tensors(source)[i], hint) * planned.decisions[node].ins[slot].share(planned.tp, hint)


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
    """A step: its parts by the names of `autotp.plans.choices.TIMES`, bytes sent by axis, bytes held."""

    times: dict[str, float]
    sends: dict[str, float]
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self.times.values())


@dataclass
class Pricer:
    """Prices meshes of one degree of tp.

    Attributes:
        terms: of the plan. cluster: the machines. example: examples of the micro-batch that was planned.
    """

    terms: Terms
    cluster: Cluster
    example: int

    def __post_init__(self) -> None:
        self._sums: dict[tuple[int, int, str], UnitSums] = {}
        self._ranks: dict[tuple[int, int, str, int, int], RankSums] = {}
        self._starts: dict[tuple[int, int], Array] = {}
        self._sends: dict[tuple[str, int], list[Sends]] = {}

    @cached_property
    def steady(self) -> dict[str, Array]:
        """Return of every unit the bytes of weights, gradients and states, and the seconds of the optimizer's step."""
        steady: dict[str, Array] = {}
        for name in ("weights", "gradients", "states", "optimizer"):
            steady[name] = np.array([getattr(u, name) for u in self.terms.units])
        return steady

    @cached_property
    def first(self) -> list[int]:
        """Return of every unit the first that is equal to it."""
        kinds: list[int] = []
        out = []
        for i, unit in enumerate(self.terms.units):
            representative = next((k for k in kinds if self.terms.units[k] == unit), None)
            kinds += [i] if representative is None else []
            out.append(i if representative is None else representative)
        return out

    def price(self, mesh: Mesh) -> Priced:
        """A step on a mesh.

        Every rank of the pipeline works through all micro-batches, the slowest sets the pace, and (pp - 1) / chunks
        micro-batches more fill and drain it. What dp sends runs beside the backward of one micro-batch.
        """
        sums, m = self.ranks(mesh), mesh.microbatches
        boundary = boundary_sends(mesh, sums.inputs, self.cluster)
        slowest, mean = float(sums.total.max()), float(sums.total.mean())
        step = {name: m * seconds for name, seconds in sums.means.items()}
        step |= {"pp": m * boundary.seconds, "uneven": m * (slowest - mean)}
        step["bubble"] = m * (slowest + boundary.seconds) * bubble(mesh.pp, mesh.chunks, m)
        waits, updates, dp_sent = self._updates(mesh, sums.backward)
        last = int((waits + updates).argmax())
        step |= {"dp": float(waits[last]), "optimizer": float(updates[last])}
        traffic = {"tp": m * sums.tp_sent, "cp": m * sums.cp_sent, "pp": m * boundary.bytes, "dp": dp_sent}
        return Priced(step, traffic, self._memory(mesh, sums))

    def ranks(self, mesh: Mesh) -> RankSums:
        """Return what the ranks of a pipeline take for a micro-batch."""
        key = mesh.cp, mesh.batch, mesh.keep, mesh.pp, mesh.chunks
        if key not in self._ranks:
            sums, starts = self.sums(mesh), self.starts(mesh.pp, mesh.chunks)
            parts = {name: self._by_rank(mesh, getattr(sums, name)) for name in ("compute", "again", "tp", "cp")}
            working = np.maximum.reduceat(sums.working, starts).reshape(mesh.chunks, mesh.pp).max(0)
            self._ranks[key] = RankSums(
                means={name: float(x.mean()) for name, x in parts.items()},
                total=np.sum(list(parts.values()), 0),
                backward=self._by_rank(mesh, sums.backward),
                tp_sent=float(self._by_rank(mesh, sums.tp_sent).mean()),
                cp_sent=float(self._by_rank(mesh, sums.cp_sent).mean()),
                inputs=float(sums.inputs.max()),
                kept_bytes=np.add.reduceat(sums.kept_bytes, starts),
                working=working,
            )
        return self._ranks[key]

    def _by_rank(self, mesh: Mesh, x: Array) -> Array:
        """The sums over the units of each rank of the pipeline."""
        stages = np.add.reduceat(x, self.starts(mesh.pp, mesh.chunks))
        return stages.reshape(mesh.chunks, mesh.pp).sum(0)

    def sums(self, mesh: Mesh) -> UnitSums:
        """Return what each unit takes, with as many examples and as much of the sequence as on this mesh."""
        key = mesh.cp, mesh.batch, mesh.keep
        if key not in self._sums:
            rows = {i: self._unit(self.terms.units[i], mesh) for i in set(self.first)}
            self._sums[key] = UnitSums(*np.array([rows[i] for i in self.first]).T)
        return self._sums[key]

    def starts(self, pp: int, chunks: int) -> Array:
        """Return where each stage begins: the division whose slowest stage is fastest, with all kept."""
        if (pp, chunks) not in self._starts:
            division = divide(weigh(self.terms.units, self.terms.tied), pp, chunks)
            assert division is not None
            self._starts[pp, chunks] = np.cumsum([0, *division.sizes[:-1]])
        return self._starts[pp, chunks]

    def _unit(self, unit: UnitCost, mesh: Mesh) -> tuple[float, ...]:
        """Return a row of `UnitSums`: tokens scale kernels, bytes and what is kept, and not what a start takes."""
        # Kernels and bytes grow with the tokens of a rank; what a start takes (launches) does not.
        size = mesh.batch / self.example
        part, both, block = size / mesh.cp, (unit.block, unit.rest), unit.block
        backward = sum(part * x.backward.kernels + x.backward.launches for x in both)
        compute = backward + sum(part * x.forward.kernels + x.forward.launches for x in both)
        calls = _total(way.calls for x in both for way in (x.forward, x.backward))
        again, kept_bytes, working = 0.0, part * (block.kept_bytes + unit.rest.kept_bytes), part * unit.working
        # Slices of what was gathered are kept in its place: gathered again in the backward, smaller until then.
        if mesh.keep == "slices":
            again = part * sum(x.again for x in both)
            kept_bytes -= part * sum(x.saved for x in both)
        # A block's inputs alone: its forward runs again, so that one block's values live beside what works.
        if mesh.keep == "inputs":
            again = part * block.forward.kernels + block.forward.launches
            again += self._over_tp(block.forward.calls, part)[0]
            kept_bytes, working = part * (unit.inputs + unit.rest.kept_bytes), working + part * block.kept_bytes
        extra = {"slices": _total(x.gathers for x in both), "inputs": block.forward.calls}.get(mesh.keep, Counter())
        seconds, nbytes = self._over_tp(calls, part)
        forwards = 2 if mesh.keep == "inputs" else 1
        attended = [context_sends(mesh, a, self.cluster, size, forwards) for a in unit.attentions]
        cp = [sends for sends, _ in attended]
        kept_bytes += sum(more for _, more in attended)
        return (
            compute, again, seconds, sum(x.seconds for x in cp), backward + again,
            nbytes + self._over_tp(extra, part)[1], sum(x.bytes for x in cp), kept_bytes, working, part * unit.inputs,
        )  # fmt: skip

    def _over_tp(self, calls: Counter[Call], part: float) -> tuple[float, float]:
        """Seconds that nothing hides, and bytes, of collectives of a part of what was planned."""
        tp, seconds, total = self.terms.tp, 0.0, 0.0
        for (primitive, size), times in calls.items():
            seconds += times * call_seconds(primitive, part * size, tp, self.cluster)
            total += times * collective_bytes(primitive, part * size, tp)
        return seconds * self.terms.exposed_share, total

    def _updates(self, mesh: Mesh, backward: Array) -> tuple[Array, Array, float]:
        """Return the seconds by rank of waiting for dp and of the optimizer, and the bytes that one sends."""
        key = mesh.shard, mesh.replicas
        if key not in self._sends:
            each = {size: weight_sends(mesh, float(size), self.cluster) for size in set(self.steady["weights"])}
            self._sends[key] = [each[size] for size in self.steady["weights"]]
        seconds = self._by_rank(mesh, np.array([x.seconds for x in self._sends[key]]))
        times = mesh.microbatches if mesh.shard == "weights" else 1
        updates = self._by_rank(mesh, self.steady["optimizer"]) / (mesh.replicas if mesh.shard else 1)
        nbytes = times * sum(x.bytes for x in self._sends[key]) / mesh.pp
        return times * np.maximum(seconds - backward, 0.0), updates, nbytes

    def _memory(self, mesh: Mesh, sums: RankSums) -> float:
        """Bytes of the fullest rank: what is steady, what is kept of the micro-batches in flight, what works."""
        starts = self.starts(mesh.pp, mesh.chunks)
        degree = dict.fromkeys(SPLIT["weights"], 1) | dict.fromkeys(SPLIT[mesh.shard], mesh.replicas)
        parts = [self.steady[name] / n for name, n in degree.items()]
        rank_bytes = np.add.reduceat(np.sum(parts, 0), starts)
        # A tied weight is held by every stage that reads it; the first has it among its own.
        for size, places in self.terms.tied:
            homes = sorted({int(np.searchsorted(starts, p, side="right")) - 1 for p in places})
            for stage in homes[1:]:
                rank_bytes[stage] += size / degree["weights"]
        rank_bytes = rank_bytes + np.minimum(_flying(mesh.pp, mesh.chunks), mesh.microbatches) * sums.kept_bytes
        # Weights that are split over dp are whole for one unit at a time.
        gathered = float(self.steady["weights"].max()) if mesh.shard == "weights" else 0.0
        return float((rank_bytes.reshape(mesh.chunks, mesh.pp).sum(0) + sums.working).max()) + gathered


@cache
def _flying(pp: int, chunks: int) -> Array:
    """Micro-batches of which each stage holds what is kept."""
    return np.array([in_flight(stage, pp, chunks) for stage in range(pp * chunks)])


def _total(calls: Iterable[Counter[Call]]) -> Counter[Call]:
    total: Counter[Call] = Counter()
    for each in calls:
        total += each
    return total
