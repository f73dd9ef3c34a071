"""A choice among meshes as a table to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autotp.text import amount, number

from . import mesh_rows
from .table import Columns

if TYPE_CHECKING:
    from autotp.plans.mesh_choice import MeshChoice

NAMES = (
    "pp",
    "dp",
    "cp",
    "tp",
    "micro",
    "split",
    "kept",
    "schedule",
    "step",
    "bubble",
    "sends",
    "memory",
    "",
    "why slower",
)


def mesh_table(choice: MeshChoice) -> RenderableType:
    """A heading, a line for each row, and what the best one is."""
    unit = choice.ranked[0].unit if choice.ranked else "samples"
    names = (*NAMES[:12], f"{unit}/s/device", NAMES[13])
    table = Columns("rrrrrlllrrrrrl", names, (*names[:12], f"{unit}/s\n/device", names[13]))
    for row in choice.rows:
        m = row.mesh
        micro = f"{m.microbatches} x {m.batch}"
        shares = f"{row.share('bubble'):.0%}", mesh_rows.exposed(row), amount(row.memory)
        degrees = (str(n) for n in m.degrees)
        how = micro, m.shard or "-", mesh_rows.KEPT[m.keep], mesh_rows.schedule(row), mesh_rows.step(row)
        table.add_row(*degrees, *how, *shares, number(row.throughput), row.why)
    of = f" x {choice.length}" if choice.length else ""
    at = f"{choice.cluster}, {choice.examples}{of} a step, {amount(choice.limit)} a rank"
    heading = f"{choice.model} on {choice.devices} devices ({at})"
    counted = f"{choice.fitting:,} of {choice.considered:,} variants fit; predicted, not measured"
    return Group(Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)), *_last(choice), Text(counted, style="dim"))


def _last(choice: MeshChoice) -> list[Text]:
    """What runs here, where that is not the first row."""
    if choice.best is None:
        return [Text("nothing fits: these hold least. Take more devices, or shorter sequences.", style="bold red")]
    if choice.runs is None:
        return [Text("autotp runs none of those that fit yet", style="yellow")]
    row = choice.runs
    m, slower = row.mesh, row.seconds / choice.best.seconds - 1
    much = "" if row.mesh == choice.best.mesh else f", {slower:.1%} slower than the first"
    kept = "" if m.keep == "all" else f", keeps {m.keep}"
    counts = f"{m.microbatches} micro-batches of {m.batch}{kept}"
    return [Text(f"autotp runs: {row.call}  {counts}: {mesh_rows.step(row)}{much}")]
