"""`autotp verify` and `autotp calibrate`: what runs on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import autotp
from autotp.errors import InputError

from .command import FINE, NO
from .options import DegreeOptions, Model, ModelOptions, SteeringOptions, writable
from .plan import loaded, read_plan
from .screen import PANEL, Screen, rank

if TYPE_CHECKING:
    from autotp.proof.compare import Report

    from .models import LoadedModel

RANKS = 2  # simulated where nothing says how many
PARTS = ("difference", "inside", "decoded", "certificate")  # of a report, which are records themselves
COPIES = 4  # of all weights: the original's, the ranks', and the gradients of both


def verify(
    model: Model,
    sizes: ModelOptions,
    degree: DegreeOptions,
    steering: SteeringOptions,
    screen: Screen,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE.json", help="Prove this plan.", show_default=False)
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", help="Decode N tokens with a cache too.", show_default=False),
    ] = None,
    certify: Annotated[bool, typer.Option("--certify", help="Have spmd_types check it too (extra certify).")] = False,
) -> int:
    """Prove a plan on simulated ranks: every value and gradient.

    Everything runs in this process, in float64.
    """
    arguments: dict[str, Any] = degree.arguments(default=RANKS) | steering.arguments()
    if {"dp", "fully_shard"} & arguments.keys():
        raise InputError(
            "verify simulates the ranks of tp, and of --cp: leave out dp and --fully-shard, as in --tp 4 or --mesh 1x4."
        )
    if plan is not None:
        if degree != DegreeOptions() or steering != SteeringOptions():
            raise InputError(f"{plan} is complete: --plan takes no options that steer planning beside it.")
        loaded_plan = read_plan(plan)
        arguments = {"tp": loaded_plan.tp, "plan": loaded_plan}
    source = loaded(model, sizes, steering, screen, real=True)
    if remark := _too_large(source):
        screen.say(remark, style="yellow")
    with screen.working(f"proving {type(source.model).__name__}"):
        if arguments["tp"] == "auto":
            result = autotp.plan(source.model, example_inputs=source.inputs, **arguments)
            arguments = {"tp": result.tp, "plan": result}
        report = autotp.verify(
            source.model, example_inputs=source.inputs, generate=generate, certify=certify, **arguments
        )
    screen.result(_table(report, source.sizes), lambda: as_data(report))
    return FINE if report else NO


def _too_large(source: LoadedModel) -> str:
    """A remark where weights, gradients and the ranks' parts, all in float64, are more than this machine has."""
    from autotp.cost.machines.this_machine import memory  # noqa: PLC0415

    nbytes = COPIES * 8 * sum(p.numel() for p in source.model.parameters())
    if nbytes < memory():
        return ""
    least = f"about {nbytes / 2**30:.0f} GiB, and this machine has {memory() / 2**30:.0f} GiB"
    return f"the proof needs {least}: take fewer layers (--set num_hidden_layers=2)"


def as_data(report: Report) -> dict[str, Any]:
    """A report as plain data, without the plan."""
    parts = {name: part and asdict(part) for name in PARTS for part in [getattr(report, name)]}
    fields = {k: getattr(report, k) for k in report.__dataclass_fields__ if k != "plan"}
    return {"ok": report.ok, "model": report.plan.model if report.plan else None, **fields, **parts}


def _table(report: Report, sizes: str) -> RenderableType:
    """What was compared, and the verdict."""
    model = report.plan.model if report.plan else "the model"
    gradients = f"no gradients: {report.forward_only}" if report.forward_only else f"{report.gradient_error:.1e}"
    capture = f"not compared: {report.unproved}" if report.unproved else f"{report.capture_error:.1e}"
    rows = [
        ("ranks", f"{report.ranks}, simulated"), ("inputs", sizes), ("values compared", str(report.values)),
        ("largest error of outputs", f"{report.output_error:.1e}"), ("largest error of gradients", gradients),
        ("tolerance", f"{report.tolerance:.0e} (float64)"), ("captured graph against the model", capture),
    ]  # fmt: skip
    if (decoded := report.decoded) is not None:
        rows += [
            ("positions", f"{decoded.positions}: {decoded.prompt} prefilled, {decoded.tokens} decoded"),
            ("largest error of their logits", f"{decoded.logits_error:.1e}"),
            ("largest error of the cache", f"{decoded.cache_error:.1e}, {decoded.states} tensors"),
        ]
    if (certified := report.certificate) is not None:
        rows += [(f"types, by {certified.checker}", "accepted" if certified else "refused")]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for row in rows:
        table.add_row(Text(f"  {row[0]}"), Text(row[1]))
    verdict = Text("equal", style="bold green") if report else Text(str(report), style="bold red")
    return Group(Text(f"{model} over {report.ranks} ranks", style="bold"), table, verdict)


def calibrate(
    screen: Screen,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the cluster: .json or .toml.", rich_help_panel=PANEL)
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What plans call the cluster.")] = "calibrated",
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A preset or file for what is not measured. Default: by the device."),
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: what torchrun started here.")
    ] = None,
) -> int:
    """Measure this machine and describe it for --cluster.

    Under torchrun its links are measured too.
    """
    from autotp.cost.machines.cluster import SUFFIXES  # noqa: PLC0415  it needs torch

    writable(out)
    if out is not None and out.suffix not in SUFFIXES:
        raise InputError(f"--out {out} must end in {' or '.join(SUFFIXES)}: the suffix says the format.")
    cluster = autotp.calibrate(name=name, base=base, devices_per_node=devices_per_node, show=not screen.json)
    if out is not None and rank() == 0:
        cluster.save(out)
        screen.say(f"wrote {out}: use it with --cluster {out}")
    if screen.json:
        screen.result("", cluster.to_dict)
    return FINE
