"""`autotp tune`: measure on this device what claims to be faster, before a run needs it."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import autotp
from autotp.text import seconds

from .command import FINE
from .options import DegreeOptions, Model, ModelOptions, SteeringOptions
from .plan import loaded
from .screen import Screen

if TYPE_CHECKING:
    import torch

    from autotp.passes.optimise import Alternative
    from autotp.runtime.lower.measured import Line


def tune(
    model: Model,
    sizes: ModelOptions,
    degree: DegreeOptions,
    steering: SteeringOptions,
    screen: Screen,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="What will run the model: eager, or a backend of torch.compile.")
    ] = "eager",
) -> int:
    """Measure kernels on this device at a model's sizes.

    Verdicts are kept in a file, which later runs read. Under torchrun what ranks send is measured too.
    """
    from autotp.passes.optimise import MEASURED, OPTIMISATIONS  # noqa: PLC0415  they need torch
    from autotp.runtime.lower.measured import path_of, watcher  # noqa: PLC0415

    source = loaded(model, sizes, steering, screen)
    rows: dict[str, dict[str, Any]] = {}
    with screen.working("planning") as working:

        def see(alternative: Alternative, line: Line, device: torch.device) -> None:
            rows[alternative.key] = _row(alternative, line, device)
            working(f"measured {len(rows)}: {alternative.name}")

        compile_measured = partial(
            autotp.compile, source.model, example_inputs=source.inputs, backend=backend, check=False,
            optimise={x.name: MEASURED for x in OPTIMISATIONS if x.measurable and not x.shares},
            **(degree.arguments(default=1) | steering.arguments()),
        )  # fmt: skip
        context = copy_context()
        context.run(watcher.set, see)
        context.run(compile_measured)
    where = path_of()
    data = {"file": None if where is None else str(where), "measured": list(rows.values())}
    screen.result(_table(data["measured"], data["file"]), lambda: data)
    return FINE


def _row(alternative: Alternative, line: Line, device: torch.device) -> dict[str, Any]:
    return {
        "name": alternative.name,
        "operands": [list(x.shape) for x in alternative.operands if x.shape is not None],
        "line": alternative.key,
        "device": str(device),
        "without": line.without,
        "with": line.with_it,
        "why": line.verdict.why,
        "used": line.verdict.used,
    }


def _table(rows: list[dict[str, Any]], file: Any) -> RenderableType:
    if not rows:
        return Text("nothing in this model's program has an alternative")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in ("", "operands on a rank", "without", "with", f"measured on {rows[0]['device']}", ""):
        table.add_column(head)
    for row in rows:
        operands = ", ".join("x".join(map(str, shape)) or "1" for shape in row["operands"])
        times = (seconds(row[way]) for way in ("without", "with"))
        table.add_row(row["name"], operands, *times, row["why"], "used" if row["used"] else "not used")
    place = f"kept in {file}" if file else "kept nowhere (AUTOTP_CACHE=0)"
    return Group(table, Text(place, style="dim"))
