"""The best mesh of so many devices: one capture, one plan for each tp, and arithmetic on the plans' terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotp.cost.meshes import KEEPS, SHARDS, Mesh, divisors, factorisations, variants
from autotp.cost.prices import lengths
from autotp.errors import InputError, PlanError
from autotp.ir.graph import Capture, shape_of, size_hint
from autotp.plans.choices import MeshChoice, MeshRow, call_of, reason
from autotp.plans.describe.dp_costs import with_axis
from autotp.plans.estimates import Axes
from autotp.plans.plan import Plan
from autotp.text import listed

from .compile import Staged, plan_stages
from .mesh_prices import Priced, Pricer, terms_of
from .options import Options

BATCH_FACTORS = (1, 2, 4, 8)  # by which a micro-batch may be larger than the example inputs


def refuse_beside_devices(devices: Any, examples: Any, tp: Any, others: bool) -> None:
    """Refuse arguments of `autotp.plan` that do not go together, or that count nothing.

    Args:
        devices, examples, tp: its `devices`, `global_batch` and `tp`.
        others: whether one is given that says how devices are used.
    """
    for name, value in (("devices", devices), ("global_batch", examples)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name}={value!r}: it is a count, so an int of at least 1.")
    if devices is None and tp is None:
        raise InputError("give tp, over how many ranks a copy of the model is split, or devices, how many there are.")
    if devices is None and examples is not None:
        raise InputError("global_batch= goes with devices=: without them the example inputs are what a rank passes.")
    if devices is not None and others:
        raise InputError(
            "devices= chooses the mesh itself: dp, fully_shard, like and within_node (a tp group always is) do not go "
            "with it. Leave them out, or leave out devices."
        )


def choose_mesh(
    captured: Capture, notes: list[str], options: Options, name: str, devices: int, examples: int | None = None,
    only: Sequence[int] | None = None,
) -> MeshChoice:  # fmt: skip
    """Price every mesh of so many devices.

    Args:
        captured: of one micro-batch; it stays as it is. notes: of the capture, for every plan.
        options: of the plans, whose tp does not count; `memory`: bytes that a rank may hold, by default the device's.
        name: the model's. devices: how many. examples: of a step over all devices; None: a micro-batch for each.
        only: degrees of tp to choose from; None: those whose groups fill a node.

    Raises:
        InputError: the objective is not training, or no micro-batches make up so many examples.
    """
    if not options.objective.training:
        raise InputError(
            f"devices= searches for training, and objective={options.objective.name!r} is asked for. For inference "
            "use autotp.sweep, and as many copies as there are devices."
        )
    inside = [tp for tp in divisors(devices) if options.cluster.devices_per_node % tp == 0]
    tps = inside
    if only is not None:
        tps = [tp for tp in only if devices % tp == 0]
    if not tps:
        raise InputError(f"tp={listed(only or ())} does not divide {devices} devices: give one of {listed(inside)}.")
    return _Search(captured, notes, options, name, devices, examples).run(tps)


@dataclass(frozen=True)
class _Inputs:
    """The example inputs: how many examples, and the length of sequences, 0 where there is none."""

    batch: int
    length: int

    @classmethod
    def of(cls, captured: Capture) -> _Inputs:
        shapes = [shape_of(leaf.node) for leaf in captured.inputs]
        first = next((size_hint(s[0], captured.hints) for s in shapes if s), 1)
        symbols = lengths(captured)
        second = (size_hint(s[1], captured.hints) for s in shapes if len(s) > 1 and s[1] in symbols)
        return cls(first, next(second, 0))


class _Search:
    def __init__(
        self, captured: Capture, notes: list[str], options: Options, name: str, devices: int, examples: int | None
    ) -> None:
        self.captured, self.notes, self.options, self.name, self.devices = captured, notes, options, name, devices
        self.inputs = _Inputs.of(captured)
        self.examples = devices * self.inputs.batch if examples is None else examples
        self.limit = options.cluster.memory_size if options.memory is None else options.memory
        self.staged: dict[int, Staged] = {}
        self.pricers: dict[int, Pricer] = {}

    def run(self, tps: Sequence[int]) -> MeshChoice:
        for tp in tps:
            self._plan(tp, last=tp == tps[-1])
        best: dict[tuple[int, ...], tuple[Mesh, Priced]] = {}
        runs: tuple[Mesh, Priced] | None = None
        considered = fitting = 0
        for mesh in self._meshes():
            priced = self.pricers[mesh.tp].price(mesh)
            considered += 1
            fitting += priced.memory <= self.limit
            if mesh.degrees not in best or self._rank(priced) < self._rank(best[mesh.degrees][1]):
                best[mesh.degrees] = mesh, priced
            fits = priced.memory <= self.limit and mesh.cp == 1 and bool(call_of(mesh))
            runs = (mesh, priced) if fits and (runs is None or priced.seconds < runs[1].seconds) else runs
        if not best:
            raise InputError(
                f"no mesh of {self.devices} devices makes a step of {self.examples} examples from micro-batches of "
                f"{self.inputs.batch} (the example inputs) or a few times as many. Give another global_batch, such as "
                f"{self.devices * self.inputs.batch}."
            )
        ranked = sorted(best.values(), key=lambda x: self._rank(x[1]))
        return self._choice(ranked, runs, considered, fitting)

    def _plan(self, tp: int, last: bool) -> None:
        """The fastest plan for this tp: what a rank holds is decided by the mesh, and a band of the whole model's step
        would be spent in the head, whose stage all others wait for."""
        options = replace(self.options, tp=tp, memory=None, band=0.0)
        try:
            staged = plan_stages(self.captured, self.notes, options, self.name)
        except PlanError:
            if last and not self.staged:
                raise
            return
        self.staged[tp] = staged
        self.pricers[tp] = Pricer(terms_of(staged), self.options.cluster, self.inputs.batch)

    def _rank(self, priced: Priced) -> tuple[bool, float, float]:
        """Return a key: what fits comes first, the fastest of it; then of the rest what holds least."""
        fits = priced.memory <= self.limit
        return not fits, priced.seconds if fits else priced.memory, priced.memory

    def _meshes(self) -> Iterator[Mesh]:
        units = len(next(iter(self.pricers.values())).terms.units)
        cps = [n for n in divisors(self.devices) if n == 1 or self._deals(n)]
        for mesh in factorisations(self.devices, list(self.pricers), cps, units):
            for each in variants(mesh, self.inputs.batch, self.examples, units, BATCH_FACTORS):
                for keep in self._keeps(mesh.tp):
                    shards = SHARDS if mesh.replicas > 1 else SHARDS[:1]
                    yield from (replace(each, shard=shard, keep=keep) for shard in shards)

    def _deals(self, cp: int) -> bool:
        """Return whether a sequence can be dealt over so many ranks: two slices for each, of one length."""
        attended = any(u.attentions for u in next(iter(self.pricers.values())).terms.units)
        return attended and bool(self.inputs.length) and self.inputs.length % (2 * cp) == 0

    def _keeps(self, tp: int) -> Sequence[str]:
        units = self.pricers[tp].terms.units
        again = any(x.saved for u in units for x in (u.block, u.rest))
        return [keep for keep in KEEPS if keep != "slices" or again]

    def _row(self, mesh: Mesh, priced: Priced) -> MeshRow:
        work = self.examples * (self.inputs.length or 1)
        flops = 3 * self.pricers[mesh.tp].terms.flops * self.examples / self.inputs.batch
        axes = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "weights"}
        return MeshRow(
            mesh=mesh,
            seconds=priced.seconds,
            times=priced.times,
            sent=priced.sends,
            network=tuple(name for name, axis in axes.items() if mesh.spans(axis, self.options.cluster)),
            memory=priced.memory,
            fits=priced.memory <= self.limit,
            throughput=work / priced.seconds / self.devices,
            unit="tokens" if self.inputs.length else "samples",
            flops=flops / priced.seconds / self.devices,
        )

    def _choice(
        self, meshes: Sequence[tuple[Mesh, Priced]], runs: tuple[Mesh, Priced] | None, considered: int, fitting: int
    ) -> MeshChoice:
        rows = [self._row(*each) for each in meshes]
        rows = [replace(row, why=reason(row, rows[0])) for row in rows]
        runnable = self._row(*runs) if runs is not None else None
        return MeshChoice(
            model=self.name,
            cluster=self.options.cluster.name,
            optimizer=self.options.objective.optimizer,
            devices=self.devices,
            examples=self.examples,
            length=self.inputs.length,
            limit=self.limit,
            ranked=tuple(rows),
            considered=considered,
            fitting=fitting,
            plans={tp: staged.plan for tp, staged in self.staged.items()},
            runs=replace(runnable, why=reason(runnable, rows[0])) if runnable is not None else None,
            plan=self._plan_of(runnable.mesh) if runnable is not None else None,
        )

    def _plan_of(self, mesh: Mesh) -> Plan:
        """The plan of a mesh that autotp runs."""
        staged, axis = self.staged[mesh.tp], Axes(mesh.dp, fully_shard=mesh.shard == "weights")
        why = f"of {self.devices} devices: pp={mesh.pp} x dp={mesh.dp} x tp={mesh.tp}"
        plan = staged.plan
        costs = with_axis(plan, staged.planned, staged.sharded, staged.builder, axis)
        plan = costs if mesh.pp == 1 else replace(plan, batch=axis)
        return replace(plan, notes=(*plan.notes, why))
