"""The figures of several degrees: the record that `autotp.sweep` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from autotp.errors import PlanError
from autotp.plans.show.report import plain, precisions_table, sweep_table
from autotp.text import amount

from .estimates import Degree
from .plan import Plan


@dataclass(frozen=True)
class Sweep:
    """The figures of each degree. Print it to read it; `to_dict` gives it as data.

    Attributes:
        model: class name; `cluster`, `objective`, `optimizer`: what it was priced for.
        batch: examples in the batch that was priced: the first dimension of the example inputs.
        limit: bytes that a rank may hold.
        rows: one `Degree` for each degree, in the order asked for; `plans`: their plans.
        precision: of the large products, in words; empty for the model's own. own: then the sweep in that, beside it.
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
    own: Sweep | None = field(repr=False, default=None)

    @property
    def best(self) -> Degree | None:
        """The degree with the most throughput per device among those that fit; of equals the smallest."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (-row.throughput, row.tp)) if fitting else None

    def chosen(self) -> Plan:
        """The plan of the best degree, which holds the table of all.

        Raises:
            PlanError: no degree fits.
        """
        if self.best is None:
            least = min(self.rows, key=lambda row: row.memory)
            raise PlanError(
                f"tp='auto': no degree of {', '.join(str(r.tp) for r in self.rows)} fits into "
                f"{amount(self.limit)} a rank: the least is {amount(least.memory)}, at tp={least.tp}.\n"
                f"{self}Take a smaller batch or a shorter length, more ranks, or larger devices (cluster=, memory=)."
            )
        why = f"tp='auto' took tp={self.best.tp}: of the degrees that fit, the most throughput per device"
        plan = self.plans[self.best.tp]
        return replace(plan, degrees=self.rows, notes=(*plan.notes, why))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plans, as plain data that JSON can hold."""
        apart = ("rows", "plans", "precision", "own")
        fields = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in apart}
        beside = {} if self.own is None else {"precision": self.precision, "own": self.own.to_dict()["rows"]}
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
        from autotp.plans.show.plot import write_svg  # noqa: PLC0415  jinja2 is read only where it is wanted

        write_svg(self, path, without)

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        precise = f", {self.precision}" if self.precision else ""
        at = f"{self.cluster}, {self.objective}, batch of {self.batch}, {amount(self.limit)} a rank{precise}"
        heading = f"{self.model} ({at})"
        if self.own is None:
            return sweep_table(self.rows, heading)
        return precisions_table(self.rows, self.own.rows, heading)
