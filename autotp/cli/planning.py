"""`autotp plan`, `autotp sweep` and `autotp explain`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autotp
from autotp.errors import InputError, PlanError
from autotp.plans.show.document import over, report
from autotp.plans.show.terminal import Sheet

from .capacity import SERVE, ServingOptions, capacity
from .command import FINE, NO
from .flags import DegreeOptions, ModelOptions, SteeringOptions, config_path, is_plan, read_degrees, writable
from .screen import Screen

if TYPE_CHECKING:
    from .models import LoadedModel

DEGREES = [1, 2, 4, 8]  # that are compared for serving, where none are asked for


def plan(
    model: str, sizes: ModelOptions, degree: DegreeOptions, steering: SteeringOptions, screen: Screen,
    serving: ServingOptions, full: bool = False, save: Path | None = None, html: Path | None = None,
    svg: Path | None = None, trace: Path | None = None,
) -> int:  # fmt: skip
    """Find the cheapest legal placement, or show a saved plan.

    Args:
        model: A known shape such as llama-3-8b, a folder or config.json of transformers (no weights needed), or
            package.module:factory. Or a saved plan.json.
        full: Print all of the plan.
        save: Write the plan, as JSON.
        html: Write a page that shows it.
        svg: Draw the weights before and after.
        trace: Write the timeline of a layer for Perfetto, as JSON.
    """
    writable(save, html, svg, trace)
    if steering.objective == SERVE:
        degrees = DEGREES if degree.tp in (None, "auto") else read_degrees(str(degree.tp))
        return capacity(partial(loaded, model, screen=screen), sizes, degrees, steering, serving, screen)
    result, priced = _saved_or_planned(model, sizes, degree, steering, screen)
    if priced:
        screen.say(f"priced for {priced}{' on each dp rank' if 'dp' in degree.arguments() else ''}")
    for path, write in ((save, result.save), (html, result.to_html), (svg, result.to_svg), (trace, result.to_trace)):
        if path is not None:
            write(path)
            screen.say(f"wrote {path}")
    screen.result(Sheet(report(result)) if full else result, result.to_json)
    return FINE


def sweep(
    model: str, sizes: ModelOptions, steering: SteeringOptions, screen: Screen, serving: ServingOptions,
    tp: str | None = None, dp: int | None = None, ep: int | None = None, devices: int | None = None,
    global_batch: int | None = None, plot: Path | None = None,
) -> int:  # fmt: skip
    """Plan for several degrees and compare them, or all meshes of so many devices.

    Args:
        model: A known shape such as llama-3-8b, a folder or config.json of transformers (no weights needed), or
            package.module:factory.
        tp: The degrees, N,N,... Default: 1,2,4,8,16,32.
        dp: Ranks that each have a batch, beside tp. ep: A divisor of dp, to shard experts over its ranks too.
        devices: Compare all meshes of so many devices.
        global_batch: With --devices: examples of a step over all.
        plot: Draw time, memory and exposed communication as SVG, with and without sequence parallelism; or meshes.
    """
    writable(plot)
    if steering.objective == SERVE and devices is None:
        degrees = read_degrees(tp) if tp else DEGREES
        return capacity(partial(loaded, model, screen=screen), sizes, degrees, steering, serving, screen)
    if devices is not None:
        return _meshes(loaded(model, sizes, steering, screen), steering, screen, tp, devices, global_batch, plot)
    if global_batch is not None:
        raise InputError("--global-batch goes with --devices: without it --batch is what is priced.")
    arguments: dict[str, Any] = {"dp": dp, "ep": ep, **({} if tp is None else {"tps": read_degrees(tp)})}
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
        raise InputError(f"--tp {tp} beside --devices: give one degree, or none to try those of up to two nodes.")
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
    """Load the model and its inputs.

    Args:
        model: as the command line names it. sizes, steering: its options. screen: shows that work goes on.
        real: with weights, where they are small.
    """
    config_path(model)  # what is not there is said at once
    with screen.working(f"building {model}"):
        from .models import load  # noqa: PLC0415  it needs torch

        source = load(model, sizes, steering.objective == "training", real)
    if source.remark:
        screen.say(source.remark, style="yellow")
    return source


def _saved_or_planned(
    model: str, sizes: ModelOptions, degree: DegreeOptions, steering: SteeringOptions, screen: Screen
) -> tuple[autotp.Plan, str]:
    """Return the saved plan where the model names its file, else the model's; and the priced inputs as text."""
    if is_plan(model):
        if any(option != type(option)() for option in (sizes, degree, steering)):
            raise InputError(f"{model} is a saved plan, which is complete: it takes no options that steer planning.")
        return read_plan(Path(model)), ""
    source = loaded(model, sizes, steering, screen)
    with screen.working(f"planning {type(source.model).__name__}"):
        options = {**degree.arguments(), **steering.arguments()}
        return autotp.plan(source.model, example_inputs=source.inputs, **options), source.sizes


def read_plan(path: Path) -> autotp.Plan:
    """Read a saved plan.

    Raises:
        InputError: the file cannot be read as one.
    """
    try:
        return autotp.Plan.load(path)
    except PlanError as error:
        raise InputError(str(error)) from error


def _plot(source: LoadedModel, result: autotp.Sweep, arguments: dict[str, Any], path: Path) -> None:
    """Draw the sweep with sequence parallelism and without; where it cannot be forced, as the cost decides."""

    def swept(sequence_parallel: bool) -> autotp.Sweep:
        if arguments["sequence_parallel"] is sequence_parallel:
            return result
        other: dict[str, Any] = {**arguments, "sequence_parallel": sequence_parallel}
        return autotp.sweep(source.model, **other)

    try:
        forced = swept(True)
    except PlanError:
        forced = result
    forced.to_svg(path, without=swept(False))


# explain


def explain(
    model: str, name: str, sizes: ModelOptions, degree: DegreeOptions, steering: SteeringOptions, screen: Screen
) -> int:
    """Explain a parameter's placement.

    The alternatives with their cost, what binds, and what would change the choice.

    Args:
        model: A known shape such as llama-3-8b, a folder or config.json of transformers (no weights needed), or
            package.module:factory.
        name: Of a parameter.
    """
    result, sizes_text = _saved_or_planned(model, sizes, degree, steering, screen)
    priced = f", priced for {sizes_text}" if sizes_text else ""
    # Refused of a saved plan, in a sentence with the parameter's placement: `autotp plan FILE --full` shows the rest.
    with screen.working(f"solving again for {name}"):
        explanation = result.explain(name)
    screen.say(f"{result.model} over {over(result)} ({result.cluster}, {result.objective}){priced}")
    screen.result(explanation, lambda: {"tp": result.tp, "dp": 1, **result.batch.degrees, **asdict(explanation)})
    return FINE
