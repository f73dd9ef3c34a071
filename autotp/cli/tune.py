"""`autotp tune`: measure on this device what claims to be faster, before a run needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import autotp

from .command import FINE
from .options import DegreeOptions, Model, ModelOptions, SteeringOptions
from .plan import loaded
from .screen import Screen

if TYPE_CHECKING:
    import torch

    from autotp.passes.optimise import Alternative, Verdict


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
    from autotp.runtime.lower.measured import Watcher, watched  # noqa: PLC0415
    from autotp.runtime.lower.verdicts import path_of  # noqa: PLC0415

    source = loaded(model, sizes, steering, screen)
    arguments: dict[str, Any] = degree.arguments(default=1) | steering.arguments()
    rows: list[dict[str, Any]] = []
    total = 0
    with screen.counting("planning") as counting:

        def ahead(count: int) -> None:
            nonlocal total
            total += count
            counting("measuring", len(rows), total)

        def see(alternative: Alternative, verdict: Verdict, device: torch.device) -> None:
            rows.append(_row(alternative, verdict, device))
            counting(f"measured: {alternative.name}", len(rows), total)

        switches = {x.name: MEASURED for x in OPTIMISATIONS if x.measurable and not x.shares}
        with watched(Watcher(see, ahead)):
            autotp.compile(
                source.model, example_inputs=source.inputs, backend=backend, optimise=switches, check=False, **arguments
            )
    where = path_of()
    data = {"file": None if where is None else str(where), "measured": rows}
    screen.result(_table(rows, data["file"]), lambda: data)
    return FINE


def _row(alternative: Alternative, verdict: Verdict, device: torch.device) -> dict[str, Any]:
    shapes = [list(x.shape) for x in alternative.operands if x.shape is not None]
    return {
        "name": alternative.name,
        "operands": shapes,
        "device": str(device),
        "why": verdict.why,
        "used": verdict.used,
    }


def _table(rows: list[dict[str, Any]], file: Any) -> RenderableType:
    if not rows:
        return Text("nothing in this model's program has an alternative")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in ("", "operands on a rank", f"measured on {rows[0]['device']}", ""):
        table.add_column(head)
    for row in rows:
        operands = ", ".join("x".join(map(str, shape)) or "1" for shape in row["operands"])
        table.add_row(row["name"], operands, row["why"], "used" if row["used"] else "not used")
    place = f"kept in {file}" if file else "kept nowhere (AUTOTP_CACHE=0)"
    return Group(table, Text(place, style="dim"))
