"""The meshes that many devices can be, priced: the record that `autotp.plan(model, devices=N)` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from autotp.cost.meshes import Mesh
from autotp.errors import InputError
from autotp.plans.show.report import plain

from .plan import Plan


@dataclass(frozen=True)
class MeshRow:
    """A mesh and the figures of a step on it.

    Attributes:
        mesh: degrees, micro-batches, schedule, what is split over dp and what is kept.
        seconds: of a step; `times`: what they are made of, by the names of `TIMES`.
        sent: bytes that a rank sends in a step over each axis; `network`: axes whose groups leave the node.
        memory: bytes that the fullest rank holds. fits: whether that is within the limit.
        throughput: `unit` a second and device. flops: floating-point operations of the model a second and device,
            without what is computed again.
        why: it is slower than the best; empty for that.
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
    why: str = ""

    def share(self, *names: str) -> float:
        """The part of the step that these of its times are."""
        part = sum(self.times[name] for name in names)
        return part / self.seconds if self.seconds else 0.0

    @property
    def call(self) -> str:
        """The call of autotp that runs it; empty where autotp does not."""
        return call_of(self.mesh)


def call_of(mesh: Mesh) -> str:
    """The call of autotp that runs a mesh; empty where it does not: cp beside dp or a pipeline, states alone that are
    split, and weights that are split beside a pipeline. What is computed again is the caller's to wrap."""
    if mesh.shard == "states" or (mesh.pp > 1 and mesh.shard) or (mesh.cp > 1 and mesh.pp * mesh.dp > 1):
        return ""
    if mesh.pp > 1:
        chunks = f", chunks={mesh.chunks}" if mesh.chunks > 1 else ""
        return f"autotp.stages(model, {mesh.pp}, {mesh.tp}, dp={mesh.dp}{chunks}, ...)"
    axis = f"cp={mesh.cp}" if mesh.cp > 1 else f"dp={mesh.dp}"
    split = ", fully_shard=True" if mesh.shard else ""
    return f"autotp.compile(model, {mesh.tp}, {axis}{split}, ...)"


@dataclass(frozen=True)
class MeshChoice:
    """The best meshes of so many devices for a model. Print it to read it; `to_dict` gives it as data.

    Attributes:
        model: class name; `cluster`, `optimizer`: what it was priced for.
        devices: how many; `examples`: in a step over all of them; `length`: of a sequence, 0 where there is none.
        limit: bytes that a rank may hold.
        ranked: of every pp x dp x cp x tp that fits its fastest variant, the fastest first, and after these of those
            that do not fit the one that holds least.
        considered, fitting: how many variants were priced, and how many of them fit.
        plans: of every tp, of one micro-batch.
        runs: the fastest variant without cp that autotp runs, `plan`: its plan with its dp, or None where none fits; a
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
    plans: Mapping[int, Plan] = field(repr=False, default_factory=dict)
    runs: MeshRow | None = field(repr=False, default=None)
    plan: Plan | None = field(repr=False, default=None)

    @property
    def rows(self) -> tuple[MeshRow, ...]:
        """The best ten that fit; where none does, the ten that hold least."""
        fit = [row for row in self.ranked if row.fits]
        return tuple((fit or sorted(self.ranked, key=lambda row: row.memory))[:10])

    @property
    def best(self) -> MeshRow | None:
        """The fastest that fits."""
        first = next(iter(self.ranked), None)
        return first if first is not None and first.fits else None

    def place(self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> tuple[int, MeshRow]:
        """Where these degrees rank among all, counted from 1, and their figures.

        Args:
            pp, dp, cp, tp: ranks of each axis.

        Raises:
            InputError: they are not among those that were priced.
        """
        for i, row in enumerate(self.ranked, 1):
            if row.mesh.degrees == (pp, dp, cp, tp):
                return i, row
        raise InputError(
            f"pp={pp} x dp={dp} x cp={cp} x tp={tp} was not priced for {self.devices} devices: their product is "
            f"{pp * dp * cp * tp}, a tp group stays in a node, stages have a repeated block each, slices of the "
            "sequence are equal, and micro-batches make up the examples of a step."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plans, as plain data that JSON can hold."""
        apart = ("ranked", "plans", "plan", "runs")
        fields = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in apart}
        runs = _data(self.runs) if self.runs is not None else None
        return {**fields, "rows": [_data(row) for row in self.rows], "runs": runs}

    def to_svg(self, path: str | Path) -> None:
        """Draw the rows: a bar for each, of what its step is made of. The file needs nothing else.

        Args:
            path: of the SVG file.
        """
        from autotp.plans.show.mesh_plot import write_svg  # noqa: PLC0415  jinja2 is read only where it is wanted

        write_svg(self, path)

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        from autotp.plans.show.mesh_table import mesh_table  # noqa: PLC0415  it reads this file's names

        return mesh_table(self)


def _data(row: MeshRow) -> dict[str, Any]:
    return {**asdict(row), "network": list(row.network), "call": row.call}
