"""Tables of priced choices: meshes of many devices (`autotp.plan(devices=N)`), and degrees (`autotp.sweep`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotp.cost.meshes import Mesh
from autotp.errors import InputError, PlanError
from autotp.plans.show import document
from autotp.plans.show.terminal import Line, Printed, Sheet, Table, View
from autotp.text import amount, number, seconds

from .estimates import Axes, Degree
from .plan import Plan

SHOWN = 10  # meshes that are shown, the fastest first


@dataclass(frozen=True)
class MeshRow:
    """A mesh and the figures of a step on it.

    Attributes:
        mesh: degrees, micro-batches, schedule, whether weights are split over dp and cp, and what is kept.
        seconds: of a step; `times`: what they are made of, by the names of `TIMES`.
        sent: bytes that a rank sends in a step over each axis; `network`: axes whose groups leave the node.
        memory: bytes that the fullest rank holds. fits: whether that is within the limit.
        throughput: `unit` a second and device. flops: floating-point operations of the model a second and device,
            without what is computed again.
        reason: the cause why it is slower than the best; empty for that.
    """

    mesh: Mesh
    seconds: float
    times: Mapping[str, float]
    sent: Mapping[str, float]
    network: tuple[str, ...]
    memory: float
    fits: bool
    throughput: float
    unit: str
    flops: float
    reason: str = ""

    def share(self, *names: str) -> float:
        """Return the share of the step that these of its times take."""
        times = [self.times[name] for name in names]
        return sum(times) / self.seconds if self.seconds else 0.0

    @property
    def call(self) -> str:
        """The call of autotp that runs it."""
        return call_of(self.mesh)


def call_of(mesh: Mesh) -> str:
    """Return the call of autotp that runs a mesh; empty where none does, for stages go with dp and ep alone.
    Checkpointing is left to the caller."""
    if mesh.pp > 1 and (mesh.fully_shard or mesh.cp > 1):
        return ""
    axes = Axes(mesh.dp, mesh.cp, ep=mesh.ep).text.replace(" x ", ", ")
    if mesh.pp > 1:
        chunks = f", chunks={mesh.chunks}" if mesh.chunks > 1 else ""
        return f"autotp.stages(model, {mesh.pp}, {mesh.tp}, {axes}{chunks}, ...)"
    split = ", fully_shard=True" if mesh.fully_shard else ""
    return f"autotp.compile(model, {mesh.tp}, {axes}{split}, ...)"


@dataclass(frozen=True)
class MeshChoice(Printed):
    """The best meshes of so many devices for a model. Print it to read it; `to_dict` gives it as data.

    Attributes:
        model: class name; `cluster`, `optimizer`: what it was priced for.
        devices: how many; `examples`: in a step over all of them; `length`: of a sequence, 0 where there is none.
        limit: bytes that a rank may hold.
        ranked: of every pp x dp x cp x tp that fits its fastest variant, the fastest first, and after these of those
            that do not fit the one that holds least. Degrees of cp that send too much to be among the ten are left out.
        considered, fitting: how many variants were priced, and how many of them fit.
        plan: what starts the best row, of one micro-batch, by `autotp.compile(model, plan=)`; None where none fits. A
            pipeline's is that of the whole model, which `autotp.stages(..., plan=)` cuts.
    """

    model: str
    cluster: str
    optimizer: str
    devices: int
    examples: int
    length: int
    limit: float
    ranked: tuple[MeshRow, ...] = field(repr=False)
    considered: int
    fitting: int
    plan: Plan | None = field(repr=False, default=None)

    @property
    def rows(self) -> tuple[MeshRow, ...]:
        """The best ten that fit; where none does, the ten that hold least."""
        fit = [row for row in self.ranked if row.fits]
        return tuple((fit or sorted(self.ranked, key=lambda row: row.memory))[:SHOWN])

    @property
    def best(self) -> MeshRow | None:
        """The fastest that fits."""
        return next((row for row in self.ranked if row.fits), None)

    def place(self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> tuple[int, MeshRow]:
        """Return the rank of these degrees among all, counted from 1, and their figures.

        Args:
            pp, dp, cp, tp: ranks of each axis. ep: of those of dp, over which experts are sharded.

        Raises:
            InputError: they are not among those that were priced.
        """
        for i, row in enumerate(self.ranked, 1):
            if (*row.mesh.degrees, row.mesh.ep) == (pp, dp, cp, tp, ep):
                return i, row
        raise InputError(
            f"pp={pp} x dp={dp} x cp={cp} x tp={tp} was not priced for {self.devices} devices: their product is "
            f"{pp * dp * cp * tp}, a tp group stays in a node, stages have a repeated block each and go with dp and tp "
            "alone, slices of the sequence are equal, cp goes as far as it could be among the fastest, and "
            "micro-batches make up the examples of a step."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the plan, as plain data that JSON can hold."""
        fields = {name: value for name, value in vars(self).items() if name not in ("ranked", "plan")}
        return {**fields, "rows": [_data(row) for row in self.rows]}

    def to_svg(self, path: str | Path) -> None:
        """Draw a bar for each row, made of the parts of its step. The file needs nothing else.

        Args:
            path: of the SVG file.
        """
        from autotp.plans.show.svg import draw_meshes  # noqa: PLC0415  jinja2 is read only where it is wanted

        draw_meshes(self, TIMES, path)

    def __rich__(self) -> Sheet:
        return Sheet(_meshes(self))


NAMES = ("", "pp", "dp", "cp", "tp", "micro", "split", "kept", "chunks", "step", "bubble", "sends", "memory")


def _meshes(choice: MeshChoice) -> View:
    """Yield a heading, a line for each row, the reason why it is slower than the first, and the call of the first."""
    unit, cells = choice.ranked[0].unit if choice.ranked else "samples", []
    by_expert = any(row.mesh.ep > 1 for row in choice.ranked)
    for i, row in enumerate(choice.rows, 1):
        m, chunks = row.mesh, "-" if row.mesh.pp == 1 else str(row.mesh.chunks)  # one: 1F1B, more: interleaved
        how = f"{m.microbatches} x {m.batch}", "weights" if m.fully_shard else "-", m.keep, chunks, seconds(row.seconds)
        shares = f"{row.share('bubble'):.0%}", f"{row.share(*AXES):.0%}", amount(row.memory), number(row.throughput)
        cells.append((i, *m.degrees, *[m.ep] * by_expert, *how, *shares))
    of = f" x {choice.length}" if choice.length else ""
    at = f"{choice.cluster}, {choice.examples}{of} a step, {amount(choice.limit)} a rank"
    yield Line(f"{choice.model} on {choice.devices} devices ({at})", style="bold")
    heads = (*NAMES[:5], *["ep"] * by_expert, *NAMES[5:])
    names, short = (*heads, f"{unit}/s/device"), (*heads, f"{unit}/s\n/device")
    yield Table(cells, f"rrrrrr{'r' * by_expert}llrrrrrr", names, short, indent=2, gap=2)
    yield from (Line(row.reason, f"  {i:>2}  ", " " * 6) for i, row in enumerate(choice.rows, 1) if row.reason)
    if choice.best is None:
        yield Line("nothing fits: these hold least. Take more devices, or shorter sequences.", style="bold red")
    else:
        m = choice.best.mesh
        counts = f"micro-batches: {m.microbatches} of {m.batch}{'' if m.keep == 'all' else f', keeps {m.keep}'}"
        yield Line(f"the first runs by: {choice.best.call}  {counts}")
    yield Line(f"{choice.fitting:,} of {choice.considered:,} variants fit; predicted, not measured", style="dim")


def _data(row: MeshRow) -> dict[str, Any]:
    fields = asdict(row)
    return {"why": fields.pop("reason"), **fields, "network": list(row.network), "call": row.call}


# several degrees


@dataclass(frozen=True)
class Sweep(Printed):
    """The figures of each degree. Print it to read it; `to_dict` gives it as data.

    Attributes:
        model: class name; `cluster`, `objective`, `optimizer`: what it was priced for.
        batch: examples in the batch that was priced: the first dimension of the example inputs.
        limit: bytes that a rank may hold.
        rows: one `Degree` for each degree, in the order asked for; `plans`: their plans.
        axes: beside tp, in words.
        precision: of the large products, in words; empty for the model's own. baseline: of another precision, the sweep
            in the model's own beside it.
    """

    model: str
    cluster: str
    objective: str
    optimizer: str
    batch: int
    limit: float
    rows: tuple[Degree, ...]
    plans: Mapping[int, Plan] = field(repr=False, default_factory=dict)
    precision: str = ""
    baseline: Sweep | None = field(repr=False, default=None)
    axes: str = "dp=1"

    @property
    def best(self) -> Degree | None:
        """The degree with the most throughput per device among those that fit; of equals the smallest."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (-row.throughput, row.tp)) if fitting else None

    def chosen(self) -> Plan:
        """Return the plan of the best degree, with the table of all that were planned.

        Raises:
            PlanError: no degree fits.
        """
        if self.best is None:
            least = min(self.rows, key=lambda row: row.memory)
            raise PlanError(
                f"tp='auto': no degree up to {self.rows[-1].tp} fits into {amount(self.limit)} a rank: the least is "
                f"{amount(least.memory)}, at tp={least.tp}.\n"
                f"{self}Take a smaller batch or a shorter length, more ranks, or larger devices (cluster=, memory=)."
            )
        note = f"tp='auto' took tp={self.best.tp}: of the degrees that fit, the most throughput per device"
        plan = self.plans[self.best.tp]
        return replace(plan, degrees=self.rows, notes=(*plan.notes, note))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the plans, as plain data that JSON can hold."""
        left_out = ("rows", "plans", "precision", "baseline", *["axes"] * (self.axes == "dp=1"))
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        beside = {} if self.baseline is None else {"precision": self.precision, "own": self.baseline.to_dict()["rows"]}
        return {**fields, "rows": [asdict(row) for row in self.rows], **beside}

    def to_svg(self, path: str | Path, without: Sweep | None = None) -> None:
        """Draw step time, memory per rank and exposed communication against tp. The file needs nothing else.

        Args:
            path: of the SVG file.
            without: a sweep of the same model with `sequence_parallel=False`, to draw beside this one, which is then
                the one with sequence parallelism.

        Raises:
            InputError: a sweep has no rows, or the two are not of the same model, cluster, objective and batch.
        """
        from autotp.plans.show.svg import draw_sweep  # noqa: PLC0415  jinja2 is read only where it is wanted

        draw_sweep(self, path, without)

    def __rich__(self) -> Sheet:
        precise = f", {self.precision}" if self.precision else ""
        precise += f", {self.axes}" if self.axes != "dp=1" else ""
        at = f"{self.cluster}, {self.objective}, batch of {self.batch}, {amount(self.limit)} a rank{precise}"
        table = document.degrees(self.rows) if self.baseline is None else _precisions(self.rows, self.baseline.rows)
        return Sheet([Line(f"{self.model} ({at})", style="bold"), table])


def _precisions(rows: Sequence[Degree], baseline: Sequence[Degree]) -> Table:
    """Tabulate the degrees in another precision beside the same in the model's own."""
    names, cells = ("tp", "step", "own", "", "sent", "own", "memory", "own", ""), []
    for r, o in zip(rows, baseline, strict=True):
        ratio = f"{r.seconds / o.seconds:.2f}" if o.seconds else "-"
        fit = "" if r.fits else "too much"
        fit += "" if o.fits else " (own: too much)"
        sizes = amount(r.sent), amount(o.sent), amount(r.memory), amount(o.memory)
        cells.append((r.tp, seconds(r.seconds), seconds(o.seconds), ratio, *sizes, fit.strip()))
    return Table(cells, "rrrlrrrrl", names, names, indent=2, gap=2)


# meshes in words

TIMES = {
    "compute": "kernels of forward and backward",
    "again": "computed or gathered again",
    "tp": "over tp",
    "cp": "over cp or ep",
    "pp": "between stages",
    "uneven": "stages that wait for the slowest",
    "bubble": "bubble",
    "dp": "waiting for dp",
    "optimizer": "optimizer",
}
AXES = ("tp", "cp", "pp", "dp")


def reason(row: MeshRow, best: MeshRow) -> str:
    """Return the reason why a mesh takes longer than the best: the time that grew most.

    Args:
        row: of the mesh. best: of the fastest that fits.
    """
    if not row.fits:
        return f"too much: {amount(row.memory)}"
    name = max(TIMES, key=lambda x: row.times[x] - best.times[x])
    if row is best or row.times[name] - best.times[name] <= 0:
        return ""
    shares = f"{row.share(name):.0%} against {best.share(name):.0%} of the step"
    if name in AXES:
        where = "over the network" if name in row.network else "in the node"
        over = "ep" if name == "cp" and row.mesh.ep > 1 else name
        return f"sends {amount(row.sent[name])} over {over} {where}, the first {amount(best.sent[name])}: {shares}"
    return f"{TIMES[name]}: {shares}"
