"""A choice among meshes as a table to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autotp.plans import choices
from autotp.text import amount, number

from .table import Columns

if TYPE_CHECKING:
    from autotp.plans.choices import MeshChoice

NAMES = ("", "pp", "dp", "cp", "tp", "micro", "split", "kept", "chunks", "step", "bubble", "sends", "memory")


def mesh_table(choice: MeshChoice) -> RenderableType:
    """A heading, a line for each row, why each is slower than the first, and what autotp runs."""
    unit = choice.ranked[0].unit if choice.ranked else "samples"
    table = Columns("rrrrrrllrrrrrr", (*NAMES, f"{unit}/s/device"), (*NAMES, f"{unit}/s\n/device"))
    for i, row in enumerate(choice.rows, 1):
        m = row.mesh
        degrees = (str(n) for n in (i, *m.degrees))
        how = f"{m.microbatches} x {m.batch}", m.shard or "-", m.keep, choices.chunks(row), choices.step(row)
        shares = f"{row.share('bubble'):.0%}", choices.exposed(row), amount(row.memory)
        table.add_row(*degrees, *how, *shares, number(row.throughput))
    of = f" x {choice.length}" if choice.length else ""
    at = f"{choice.cluster}, {choice.examples}{of} a step, {amount(choice.limit)} a rank"
    heading = f"{choice.model} on {choice.devices} devices ({at})"
    slower = [Text(f"  {i:>2}  {row.why}") for i, row in enumerate(choice.rows, 1) if row.why]
    counted = f"{choice.fitting:,} of {choice.considered:,} variants fit; predicted, not measured"
    parts = [Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)), *slower, *_last(choice)]
    return Group(*parts, Text(counted, style="dim"))


def _last(choice: MeshChoice) -> list[Text]:
    """What runs here, where that is not the first row."""
    if choice.best is None:
        return [Text("nothing fits: these hold least. Take more devices, or shorter sequences.", style="bold red")]
    if choice.runs is None:
        return [Text("autotp runs none of those that fit yet", style="yellow")]
    row = choice.runs
    m, slower = row.mesh, row.seconds / choice.best.seconds - 1
    much = "" if row.mesh == choice.best.mesh else f", {slower:.1%} slower than the first"
    keep = "" if m.keep == "all" else f", keeps {m.keep}"
    counts = f"micro-batches: {m.microbatches} of {m.batch}{keep}"
    return [Text(f"autotp runs: {row.call}  {counts}: {choices.step(row)}{much}")]
