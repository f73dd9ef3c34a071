"""The search for the best mesh of so many devices, by one plan for each tp and cp and arithmetic on the plans' terms;
and for the best number of dp ranks to shard experts over, by one plan for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from torch import fx

from autotp.cost.meshes import KEEPS, Mesh, factorisations, variants
from autotp.cost.units import Unit
from autotp.errors import CaptureError, InputError, PlanError
from autotp.inputs import Inputs, examples_of
from autotp.ir.graph import Capture, where
from autotp.ir.scopes import generic
from autotp.log import stage
from autotp.passes.shard.deal import DealAxis, own_copy
from autotp.passes.shard.own_rows import experts_of, regions
from autotp.passes.shard.sequence_axis import SequenceRules
from autotp.passes.stages.balance import units_of
from autotp.plans.choices import SHOWN, MeshChoice, MeshRow, call_of, reason
from autotp.plans.describe.dp_costs import with_axis
from autotp.plans.estimates import ALONE, Axes, refuse_travel
from autotp.plans.explain import explain
from autotp.plans.plan import Plan
from autotp.text import amount, axis_text, counts, divisors, listed, seconds

from .compile import plan_stages
from .mesh_prices import Machines, Priced, Pricer, terms_of
from .options import Options
from .shares import Staged
from .staging import machines_of

# By tp and axes beside it; whether it is compared with the model, and whether sharded over cp
Captured = Callable[..., tuple[Capture, list[str]]]
BATCH_FACTORS = (1, 2, 4, 8)  # by which a micro-batch may be larger than the example inputs


def refuse_beside_devices(devices: Any, examples: Any, tp: Any, others: bool) -> None:
    """Refuse arguments of `autotp.plan` that do not go together, or that count nothing.

    Args:
        devices, examples, tp: its `devices`, `global_batch` and `tp`.
        others: whether one is given that says how devices are used.
    """
    for name, value in (("devices", devices), ("global_batch", examples)):
        if value is not None and not counts(value):
            raise InputError(f"{name}={value!r}: it is a count, so an int of at least 1.")
    if devices is None and tp is None:
        raise InputError("give tp, over how many ranks a copy of the model is split, or devices, how many there are.")
    if devices is None and examples is not None:
        raise InputError("global_batch= goes with devices=: without them the example inputs are what a rank passes.")
    if devices is not None and others:
        raise InputError(
            "devices= chooses the mesh itself: dp, cp, ep, fully_shard, like and within_node do not go with it. "
            "Leave them out, or leave out devices."
        )


def choose_mesh(
    captured: Captured, inputs: Inputs, options: Options, name: str, devices: int, examples: int | None = None,
    only: int | str | None = None,
) -> MeshChoice:  # fmt: skip
    """Price every mesh of so many devices that autotp runs, and rank them.

    Args:
        captured: makes the program of one micro-batch, as `autotp.compile` would; it raises where cp cannot be.
        inputs: of that micro-batch.
        options: of the plans, whose tp does not count; `memory`: bytes that a rank may hold, by default the device's.
        name: the model's. devices: how many. examples: of a step over all devices; None: a micro-batch for each.
        only: the degree of tp; None or "auto": to choose from those whose groups fill a node, and two nodes.

    Raises:
        InputError: the objective is not training, or no micro-batches make up so many examples.
    """
    if not options.objective.training:
        raise InputError(
            f"devices= searches for training, and objective={options.objective.name!r} is asked for. For inference "
            "use autotp.sweep, and as many copies as there are devices."
        )
    node, ranks = options.cluster.devices_per_node, len(options.cluster.ranks) or devices
    if ranks != devices:
        raise InputError(f"devices={devices}, and the cluster {options.cluster.name!r} says {ranks} unlike ranks.")
    # Over more than two nodes the slow link carries what a tp group sends at every layer several times.
    inside = [tp for tp in divisors(devices) if node % tp == 0 or tp == 2 * node]
    tps = [only] if isinstance(only, int) else inside
    if devices % tps[0]:
        raise InputError(f"tp={only} does not divide {devices} devices: give one of {listed(inside)}.")
    batch = examples_of((inputs.args, inputs.kwargs))
    if examples is not None and examples % batch:
        raise InputError(
            f"global_batch={examples} is not made up of micro-batches of {batch} examples, as the example inputs are: "
            f"give a multiple of {batch}, or other example inputs."
        )
    return _Search(captured, batch, options, name, devices, examples).run(tps)


class _Search:
    def __init__(
        self, captured: Captured, batch: int, options: Options, name: str, devices: int, examples: int | None
    ) -> None:
        self.captured, self.options, self.name, self.devices = captured, options, name, devices
        self.batch, self.programs = batch, {ALONE: captured(1, ALONE)}
        self.experts = experts_of(self.programs[ALONE][0])
        self.examples = devices * batch if examples is None else examples
        self.limit = options.cluster.memory_size if options.memory is None else options.memory
        self.staged: dict[tuple[int, int, int], Staged] = {}
        self.pricers: dict[tuple[int, int, int], Pricer] = {}

    @property
    def length(self) -> int:
        """Length of the example inputs' sequences; 0 where there are none."""
        return next(iter(self.staged.values())).plan.totals.length

    def run(self, tps: Sequence[int]) -> MeshChoice:
        planned = [tp for tp in tps if self._goes(tp, 1)]
        if not self.staged:
            self._priced(tps[-1], 1)  # raises why
        self._beside(planned)
        if not (best := self._best()):
            raise InputError(
                f"no mesh of {self.devices} devices makes a step of {self.examples} examples from micro-batches of "
                f"{self.batch} (the example inputs) or a few times as many. Give another global_batch, such as "
                f"{self.devices * self.batch}."
            )
        fits = [priced.fits for _, priced in self._every()]
        return self._choice(best, len(fits), sum(fits))

    def _beside(self, tps: Sequence[int]) -> None:
        """Plan for each tp with the degrees of cp that sequences can be sharded over, in two chunks of one length for
        each rank, as far as they are worth it; and with those of ep."""
        last = dict.fromkeys(tps if self.length else (), 1)
        # By cp, so that what another tp gained by so many ranks of it ends the growth of one that cannot keep up.
        for cp in divisors(self.devices)[1:]:
            for tp in list(last):
                if self.devices % (tp * cp) or self.length % (2 * cp):
                    continue
                # A tp that is out stays out: more ranks would send more still.
                if self._worth(tp, last.pop(tp)) and self._goes(tp, cp):
                    last[tp] = cp
        # Of experts over a part of a node rows travel as fast as over all of it, and more of them are held.
        node = min(self.options.cluster.devices_per_node, self.devices)
        for tp in tps:
            for ep in divisors(math.gcd(self.devices // tp, self.experts))[1:]:
                if ep * tp % node == 0 and not self._goes(tp, 1, ep):
                    break

    def _worth(self, tp: int, cp: int) -> bool:
        """Say whether more ranks of cp could be among the rows that are shown: for the same arithmetic they send more,
        so they take no less time than these would, had they memory for all that the backward reads."""
        steps = [priced.seconds for _, priced in self._best() if priced.fits]
        steps_of = [priced.seconds for mesh, priced in self._every() if mesh.inner == (tp, cp, 1)]
        return len(steps) < SHOWN or min(steps_of, default=0.0) < steps[SHOWN - 1]

    def _best(self) -> list[tuple[Mesh, Priced]]:
        """Rank the fastest variant of every mesh: the fastest of those that fit first, then those that hold least."""
        best: dict[tuple[int, ...], tuple[Mesh, Priced]] = {}
        ranked = sorted(self._every(), key=lambda x: (not x[1].fits, x[1].seconds if x[1].fits else 0.0, x[1].memory))
        for mesh, priced in ranked:
            best.setdefault((*mesh.degrees, mesh.ep), (mesh, priced))
        return [*best.values()]

    def _every(self) -> Iterator[tuple[Mesh, Priced]]:
        return ((mesh, self.pricers[mesh.inner].price(mesh)) for mesh in self._meshes())

    def _goes(self, tp: int, cp: int, ep: int = 1) -> bool:
        """Plan for these degrees; return False where they cannot be."""
        try:
            self._priced(tp, cp, ep)
        except (CaptureError, InputError, PlanError):
            return False
        return True

    def _priced(self, tp: int, cp: int, ep: int = 1) -> None:
        """Make the fastest plan for these degrees: the mesh decides the bytes of a rank, and a band of the whole
        model's step would be spent in the head, whose stage all others wait for."""
        options, axes = replace(self.options, tp=tp, memory=None, band=0.0), Axes(ep, cp, ep=ep)
        if axes not in self.programs:
            self.programs[axes] = self.captured(tp, axes, check=False, dealt=False)
        captured, notes = self.programs[axes]
        with stage(f"tp={tp}, cp={cp}, ep={ep}"):
            if cp > 1:  # what a rank of it has depends on the heads that tp leaves it
                captured = own_copy(captured)
                notes = [*notes, *DealAxis(SequenceRules, cp, tp, options.cluster).deal(captured).notes]
            staged = self.staged[tp, cp, ep] = plan_stages(captured, notes, options, self.name)
        self.pricers[tp, cp, ep] = Pricer(terms_of(staged), self.options.cluster, self.batch, self._machines(staged))

    def _machines(self, staged: Staged) -> Callable[[int], Machines]:
        """Make the function from a number of pipeline places to their machines, by a plan's prices."""
        planned, sharded, choice = staged.planned, staged.sharded, staged.plan.share_choice
        units, prices = units_of(planned, sharded) or [Unit("", 0)], staged.builder.prices

        @cache
        def machines(pp: int) -> Machines:
            places = self.options.cluster.places(pp)
            limit = self.limit if self.options.memory is not None or len({*places}) == 1 else None
            if len(places) == 1 and choice is not None:  # tp has all devices: what the fullest rank has counts
                limit = choice.limits[choice.memory.index(max(choice.memory))]
            return machines_of(planned, sharded, prices, units, places, limit)

        return machines

    def _meshes(self) -> Iterator[Mesh]:
        units = len(next(iter(self.pricers.values())).terms.units)
        for mesh in factorisations(self.devices, list(self.pricers), units):
            if mesh.ep > 1 and self.experts % mesh.dp:
                continue  # a rank holds no part of them, but all
            for batched in variants(mesh, self.batch, self.examples, units, BATCH_FACTORS):
                for keep in KEEPS:
                    for split in (False, True)[: mesh.replicas]:
                        variant = replace(batched, fully_shard=split, keep=keep)
                        if call_of(variant):
                            yield variant

    def _row(self, mesh: Mesh, priced: Priced) -> MeshRow:
        work = self.examples * (self.length or 1)
        flops = 3 * self.pricers[mesh.tp, 1, 1].terms.flops * self.examples / self.batch
        axes = {"tp": "tp", "cp": "ep" if mesh.ep > 1 else "cp", "pp": "pp", "dp": "weights"}
        return MeshRow(
            mesh=mesh,
            seconds=priced.seconds,
            times=priced.times,
            sent=priced.sends,
            network=tuple(name for name, axis in axes.items() if mesh.spans(axis, self.options.cluster)),
            memory=priced.memory,
            fits=priced.fits,
            throughput=work / priced.seconds / self.devices,
            unit="tokens" if self.length else "samples",
            flops=flops / priced.seconds / self.devices,
        )

    def _choice(self, meshes: Sequence[tuple[Mesh, Priced]], considered: int, fitting: int) -> MeshChoice:
        rows = [self._row(mesh, priced) for mesh, priced in meshes]
        return MeshChoice(
            model=self.name,
            cluster=self.options.cluster.name,
            optimizer=self.options.objective.optimizer,
            devices=self.devices,
            examples=self.examples,
            length=self.length,
            limit=self.limit,
            ranked=tuple(replace(row, reason=reason(row, rows[0])) for row in rows),
            considered=considered,
            fitting=fitting,
            plan=self._plan_of(rows[0].mesh) if rows[0].fits else None,
        )

    def _plan_of(self, mesh: Mesh) -> Plan:
        """Return the plan for a mesh."""
        staged, axis = self.staged[mesh.inner], Axes(mesh.dp, mesh.cp, mesh.fully_shard, ep=mesh.ep)
        degrees = axis_text(dict(zip(("pp", "dp", "cp", "tp"), mesh.degrees, strict=True)))
        degrees += f", ep={mesh.ep}" if mesh.ep > 1 else ""
        if mesh.pp > 1 and self.options.cluster.ranks:
            starts = [*self.pricers[mesh.inner].starts(mesh.pp, mesh.chunks), len(self.pricers[mesh.inner].terms.units)]
            degrees += f", blocks of each stage {' '.join(str(b - a) for a, b in pairwise(starts))}"
        plan = replace(staged.plan, batch=axis)  # of the whole model: what a stage waits for is not in it
        if mesh.pp == 1:
            plan = with_axis(staged.plan, staged.planned, staged.sharded, staged.builder, axis)
        return replace(plan, notes=(*plan.notes, f"of {self.devices} devices: {degrees}"))


# ---- experts, replicated over dp or sharded over it ------------------------------------------------------------------


WORDS = {
    "compute": "kernels", "launches": "starting kernels", "communication": "sending rows and other values",
    "optimizer": "the optimizer's step", "waiting": "waiting for gradients over dp",
}  # fmt: skip


def choose_experts(
    captured: Captured, solve: Callable[..., Plan], options: Options,
    keywords: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Plan with experts over every number of ranks of dp, and return the fastest that fits, with the others' prices.

    Args:
        captured: makes the program of a rank of dp, by tp, axes, and whether it is compared with the model.
        solve: plans that, by program, notes and options. keywords: of `autotp.plan`.
        options: with dp; `memory`: bytes that a rank may hold, by default the device's.

    Raises:
        InputError: there is no dp, or a keyword goes with replicated experts alone. PlanError: nothing fits `memory`.
    """
    axes, tp = options.batch, options.tp
    if axes.dp == 1:
        raise InputError("ep='auto' deals experts to ranks of dp, and dp is 1. Give dp, or leave out ep.")
    refuse_travel(replace(axes, ep=axes.dp), keywords)
    program, notes = captured(tp, axes)
    plans, errors = dict[int, Plan](), []
    for ep in divisors(math.gcd(axes.dp, experts_of(program))):
        sharded = replace(axes, ep=ep)
        try:
            capture = (program, notes) if ep == 1 else captured(tp, sharded, False)
            plans[ep] = solve(*capture, replace(options, batch=sharded))
        except (CaptureError, InputError, PlanError) as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    limit = options.cluster.memory_size if options.memory is None else options.memory

    def rank(plan: Plan) -> tuple[bool, float]:
        over = plan.memory.peak > limit
        return over, plan.memory.peak if over else plan.totals.seconds

    best, *others = sorted(plans.values(), key=rank)
    names = {leaf.node: leaf.name for leaf in program.leaves}
    mixtures = {generic(where(x)): w for region in regions(program) for x, (_, w) in region.products.items()}
    cause = _cause(best, others[0], limit) if others else "no number of ranks has as many experts each"
    priced = "; ".join(f"{_way(plan)}: {seconds(plan.totals.seconds)}, {amount(plan.memory.peak)}" for plan in others)
    text = f"ep='auto': {_way(best)}, {seconds(best.totals.seconds)} a step: {cause}{f' ({priced})' if priced else ''}"
    ways = [f"{name}: {_way(best)}{_over_tp(best, w, names)}" for name, w in mixtures.items()]
    return replace(best, notes=(*best.notes, text, *ways))


def _over_tp(plan: Plan, weight: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Describe the placement of experts over tp, with the prices of a step by each."""
    if plan.tp == 1:
        return ""
    while weight not in names:
        weight = weight.all_input_nodes[0]
    choice, *_ = ways = explain(plan, names[weight]).alternatives
    rest, texts = plan.totals.seconds - choice.seconds, []
    for words, by_expert in (("by expert", True), ("within the expert", False)):
        steps = [x.seconds + rest for x in ways if not x.reason and ("Shard(0)" in x.layout) == by_expert]
        texts += [f"{words} {seconds(min(steps))}"] if steps else []
    return f"; over tp {choice.layout}: a step is {' and '.join(texts)}"


def _way(plan: Plan) -> str:
    """Describe the placement of experts over dp."""
    return f"rows travel over ep={plan.batch.ep}" if plan.batch.ep > 1 else "experts whole on each dp rank"


def _cause(best: Plan, other: Plan, limit: float) -> str:
    """Say why the next best plan is not the best: its largest excess."""
    if best.memory.peak <= limit < other.memory.peak:
        return f"{_way(other)} does not fit"
    excess = {name: other.totals.terms.get(name, 0.0) - best.totals.terms.get(name, 0.0) for name in WORDS}
    most = max(excess, key=excess.__getitem__)
    return f"{_way(other)} takes {seconds(excess[most])} longer for {WORDS[most]}"
