"""`autotp plan` and `autotp sweep`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import autotp
from autotp.errors import InputError, PlanError

from .command import FINE, NO
from .options import DegreeOptions, Model, ModelOptions, ModelOrPlan, SteeringOptions, read_degrees, writable
from .paths import config_path, is_plan
from .screen import PANEL, Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .models import LoadedModel


def plan(
    model: ModelOrPlan,
    sizes: ModelOptions,
    degree: DegreeOptions,
    steering: SteeringOptions,
    screen: Screen,
    full: Annotated[
        bool, typer.Option("--full", metavar="", help="Print all of the plan.", rich_help_panel=PANEL)
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the plan.", rich_help_panel=PANEL)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page that shows it.", rich_help_panel=PANEL)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the timeline of a layer for Perfetto.", rich_help_panel=PANEL),
    ] = None,
) -> int:
    """Find the cheapest legal placement, or show a saved plan."""
    writable(save, html, trace)
    result = saved(model, sizes, degree, steering)
    if result is None:
        source = loaded(model, sizes, steering, screen)
        with screen.working(f"planning {type(source.model).__name__}"):
            options = {**degree.arguments(), **steering.arguments()}
            result = autotp.plan(source.model, example_inputs=source.inputs, **options)
        screen.say(f"priced for {source.sizes}{' on each dp rank' if 'dp' in degree.arguments() else ''}")
    files: list[tuple[Path | None, Callable[[Any, Path], None]]] = [
        (save, autotp.Plan.save),
        (html, autotp.Plan.to_html),
        (trace, autotp.Plan.to_trace),
    ]
    for path, write in files:
        if path is not None:
            write(result, path)
            screen.say(f"wrote {path}")
    screen.result(_everything(result) if full else result, result.to_json)
    return FINE


def sweep(
    model: Model,
    sizes: ModelOptions,
    steering: SteeringOptions,
    screen: Screen,
    tp: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The degrees. Default: 1,2,4,8,16,32.", show_default=False)
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compare all meshes of so many devices.", show_default=False),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --devices: examples of a step over all.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg",
            help="Draw time, memory and exposed communication, with and without sequence parallelism; or meshes.",
            rich_help_panel=PANEL,
        ),
    ] = None,
) -> int:
    """Plan for several degrees and compare them, or all meshes of so many devices."""
    writable(plot)
    if devices is not None:
        return _meshes(loaded(model, sizes, steering, screen), steering, screen, tp, devices, global_batch, plot)
    if global_batch is not None:
        raise InputError("--global-batch goes with --devices: without it --batch is what is priced.")
    arguments: dict[str, Any] = {} if tp is None else {"tps": read_degrees(tp)}
    source = loaded(model, sizes, steering, screen)
    arguments |= {"example_inputs": source.inputs, **steering.arguments()}
    with screen.working(f"planning {type(source.model).__name__}"):
        result = autotp.sweep(source.model, **arguments)
        if plot is not None:
            _plot(source, result, arguments, plot)
            screen.say(f"wrote {plot}")
    screen.say(f"priced for {source.sizes}")
    best = result.best
    screen.result(result, lambda: {**result.to_dict(), "best": None if best is None else best.tp})
    if best is None:
        screen.say("no degree fits into the memory of a rank", style="yellow")
    return NO if best is None else FINE


def _meshes(
    source: LoadedModel, steering: SteeringOptions, screen: Screen, tp: str | None, devices: int,
    global_batch: int | None, plot: Path | None,
) -> int:  # fmt: skip
    """Compare meshes of devices."""
    degrees = read_degrees(tp) if tp is not None else [None]
    if len(degrees) > 1:
        raise InputError(f"--tp {tp} beside --devices: give one degree, or none to try all that stay in a node.")
    with screen.working(f"planning {type(source.model).__name__}"):
        options = {"example_inputs": source.inputs, "global_batch": global_batch, **steering.arguments()}
        choice = autotp.plan(source.model, degrees[0], devices=devices, **options)
    if plot is not None:
        choice.to_svg(plot)
        screen.say(f"wrote {plot}")
    screen.say(f"priced for micro-batches of {source.sizes} or a few times as many examples")
    screen.result(choice, choice.to_dict)
    return NO if choice.best is None else FINE


def loaded(
    model: str, sizes: ModelOptions, steering: SteeringOptions, screen: Screen, real: bool = False
) -> LoadedModel:
    """The model and its inputs.

    Args:
        model: as the command line names it. sizes, steering: its options. screen: shows what takes long.
        real: with weights, where they are small.
    """
    config_path(model)  # what is not there is said at once
    with screen.working(f"building {model}"):
        from .models import load  # noqa: PLC0415  it needs torch

        source = load(model, sizes, steering.objective == "training", real)
    if source.remark:
        screen.say(source.remark, style="yellow")
    return source


def saved(model: str, *steering: ModelOptions | DegreeOptions | SteeringOptions) -> autotp.Plan | None:
    """The plan, where the model is the file of a saved one, which takes nothing that steers planning."""
    if not is_plan(model):
        return None
    if any(option != type(option)() for option in steering):
        raise InputError(f"{model} is a saved plan, which is complete: it takes no options that steer planning.")
    return read_plan(Path(model))


def read_plan(path: Path) -> autotp.Plan:
    """A saved plan.

    Raises:
        InputError: the file cannot be read as one.
    """
    try:
        return autotp.Plan.load(path)
    except PlanError as error:
        raise InputError(str(error)) from error


def _everything(plan: autotp.Plan) -> RenderableType:
    from autotp.plans.show.document import report  # noqa: PLC0415  only for --full
    from autotp.plans.show.terminal import Screen  # noqa: PLC0415

    return Screen(report(plan))


def _plot(source: LoadedModel, result: autotp.Sweep, arguments: dict[str, Any], path: Path) -> None:
    """Draw the sweep with sequence parallelism and without; where it cannot be forced, what the cost decides."""

    def other(sequence_parallel: bool) -> autotp.Sweep:
        if arguments["sequence_parallel"] is sequence_parallel:
            return result
        return autotp.sweep(source.model, **{**arguments, "sequence_parallel": sequence_parallel})

    try:
        forced = other(True)
    except PlanError:
        forced = result
    forced.to_svg(path, without=other(False))
