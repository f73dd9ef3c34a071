"""`autotp verify`, `autotp calibrate`, `autotp tune` and `autotp serve`: the commands that run on this machine."""

from __future__ import annotations

import importlib.util
import os
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autotp
from autotp.errors import InputError
from autotp.plans.show.terminal import Line, Sheet, Table
from autotp.text import seconds

from .command import FINE, NO
from .flags import DegreeOptions, ModelOptions, SteeringOptions, writable
from .planning import loaded, read_plan
from .screen import Screen, rank

if TYPE_CHECKING:
    import torch

    from autotp.passes.optimise import Alternative
    from autotp.proof.report import Report
    from autotp.runtime.lower.measured import Line as Measurement

    from .models import LoadedModel

RANKS = 2  # simulated where nothing says how many
PARTS = ("difference", "inside", "decoded", "certificate")  # of a report, which are records themselves
COPIES = 4  # of all weights: the original's, the ranks', and the gradients of both


def verify(
    model: str, sizes: ModelOptions, degree: DegreeOptions, steering: SteeringOptions, screen: Screen,
    plan: Path | None = None, generate: int | None = None, certify: bool = False,
) -> int:  # fmt: skip
    """Prove a plan on simulated ranks: every value and gradient.

    Everything runs in this process, in float64.

    Args:
        model: A known shape such as llama-3-8b, a folder or config.json of transformers (no weights needed), or
            package.module:factory.
        plan: Prove this plan, a JSON file.
        generate: Decode so many tokens with a cache too.
        certify: Have spmd_types check it too (extra certify).
    """
    arguments: dict[str, Any] = degree.arguments(default=RANKS) | steering.arguments()
    if "fully_shard" in arguments:
        raise InputError(
            "verify proves values, of which splitting weights over dp or cp changes none: leave out --fully-shard."
        )
    if plan is not None:
        if replace(degree, pp=1) != DegreeOptions() or steering != SteeringOptions():
            raise InputError(f"{plan} is complete: --plan takes no options that steer planning beside it.")
        loaded_plan = read_plan(plan)
        arguments = {"tp": loaded_plan.tp, "plan": loaded_plan, "pp": degree.pp}
    source = loaded(model, sizes, steering, screen, real=True)
    if remark := _too_large(source):
        screen.say(remark, style="yellow")
    with screen.working(f"proving {type(source.model).__name__}"):
        if arguments["tp"] == "auto":
            arguments.pop("pp", None)
            result = autotp.plan(source.model, example_inputs=source.inputs, **arguments)
            arguments = {"tp": result.tp, "plan": result, "pp": degree.pp}
        report = autotp.verify(
            source.model, example_inputs=source.inputs, generate=generate, certify=certify, **arguments
        )
    screen.result(_report(report, source.sizes), lambda: as_data(report))
    return FINE if report else NO


def _too_large(source: LoadedModel) -> str:
    """Return a remark where weights, gradients and the ranks' parts, all in float64, exceed this machine's memory."""
    from autotp.cost.machines.this_machine import memory  # noqa: PLC0415

    nbytes = COPIES * 8 * sum(p.numel() for p in source.model.parameters())
    if nbytes < memory():
        return ""
    least = f"about {nbytes / 2**30:.0f} GiB, and this machine has {memory() / 2**30:.0f} GiB"
    return f"the proof needs {least}: take fewer layers (--set num_hidden_layers=2)"


def as_data(report: Report) -> dict[str, Any]:
    """Return a report as plain data, without the plan."""
    parts = {name: part and asdict(part) for name in PARTS for part in [getattr(report, name)]}
    fields = {k: getattr(report, k) for k in report.__dataclass_fields__ if k != "plan"}
    return {"ok": report.ok, "model": report.plan.model if report.plan else None, **fields, **parts}


def _report(report: Report, sizes: str) -> Sheet:
    """Return the figures that were compared, and the verdict."""
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
            ("calls of the model", f"{decoded.calls}: a prefill, {decoded.tokens} decoded tokens"),
            ("largest error of these", f"{decoded.error:.1e}, {decoded.states} cached tensors"),
        ]
    if (certified := report.certificate) is not None:
        rows += [(f"types, by {certified.checker}", "accepted" if certified else "refused")]
    title = Line(f"{model} over {report.ranks} ranks", style="bold")
    verdict = Line("equal", style="bold green") if report else Line(str(report), style="bold red")
    return Sheet([title, Table(rows, "ll", indent=2), verdict])


def calibrate(
    screen: Screen, out: Path | None = None, name: str = "calibrated", base: str | None = None,
    devices_per_node: int | None = None,
) -> int:  # fmt: skip
    """Measure this machine and describe it for --cluster.

    Under torchrun its links are measured too.

    Args:
        out: Write the cluster: .json or .toml.
        name: What plans call the cluster.
        base: A preset or file for what is not measured. Default: by the device.
        devices_per_node: Default: what torchrun started here.
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


# tune


def tune(
    model: str, sizes: ModelOptions, degree: DegreeOptions, steering: SteeringOptions, screen: Screen,
    backend: str = "eager",
) -> int:  # fmt: skip
    """Measure kernels on this device at a model's sizes.

    Verdicts are kept in a file, which later runs read. Under torchrun what ranks send is measured too.

    Args:
        model: A known shape such as llama-3-8b, a folder or config.json of transformers (no weights needed), or
            package.module:factory.
        backend: What will run the model: eager, or a backend of torch.compile.
    """
    from autotp.passes.optimise import MEASURED, OPTIMISATIONS  # noqa: PLC0415  they need torch
    from autotp.runtime.lower.measured import path_of, watcher  # noqa: PLC0415

    source = loaded(model, sizes, steering, screen)
    rows: dict[str, dict[str, Any]] = {}
    with screen.working("planning") as working:

        def see(alternative: Alternative, line: Measurement, device: torch.device) -> None:
            rows[alternative.key] = _row(alternative, line, device)
            working(f"measured {len(rows)}: {alternative.name}")

        compile_measured = partial(
            autotp.compile, source.model, example_inputs=source.inputs, backend=backend, check=False,
            optimise={x.name: MEASURED for x in OPTIMISATIONS if x.measurable},
            **(degree.arguments(default=1) | steering.arguments()),
        )  # fmt: skip
        context = copy_context()
        context.run(watcher.set, see)
        context.run(compile_measured)
    where = path_of()
    data = {"file": None if where is None else str(where), "measured": list(rows.values())}
    screen.result(_verdicts(data["measured"], data["file"]), lambda: data)
    return FINE


def _row(alternative: Alternative, line: Measurement, device: torch.device) -> dict[str, Any]:
    return {
        "name": alternative.name,
        "operands": [list(x.shape) for x in alternative.operands if x.shape is not None],
        "line": alternative.key,
        "device": str(device),
        "without": line.without,
        "with": line.with_it,
        "why": line.verdict.reason,
        "used": line.verdict.used,
    }


def _verdicts(rows: list[dict[str, Any]], file: Any) -> Sheet:
    if not rows:
        return Sheet([Line("nothing in this model's program has an alternative")])
    names = "", "operands on a rank", "without", "with", f"measured on {rows[0]['device']}", ""
    cells = []
    for row in rows:
        operands = ", ".join("x".join(map(str, shape)) or "1" for shape in row["operands"])
        times = (seconds(row[way]) for way in ("without", "with"))
        cells.append((row["name"], operands, *times, row["why"], "used" if row["used"] else "not used"))
    place = f"kept in {file}" if file else "kept nowhere (AUTOTP_CACHE=0)"
    return Sheet([Table(cells, "llllll", names), Line(place, style="dim")])


# a server

FOLDER_FILES = "config.json", "adapter_config.json"
SERVER_PACKAGES, KEY_VARIABLE = ("transformers", "fastapi", "uvicorn", "openai"), "AUTOTP_API_KEY"


def serve(
    folders: list[Path], screen: Screen, tp: int = 1, dp: int = 1, dtype: str | None = None, host: str = "127.0.0.1",
    port: int = 8000, api_key: str | None = None, origin: list[str] | None = None, max_tokens: int = 1024,
    concurrent: int = 256, pool: int | None = None, cluster: str | None = None,
) -> int:  # fmt: skip
    """Serve a folder of transformers, and adapters of PEFT to it, over ranks of this machine, as OpenAI's API.

    Chat and plain completions, models and health. It starts the ranks itself, and ends by Ctrl-C, after the answers
    that are under way.

    Args:
        folders: Of the model, its weights and tokenizer, as save_pretrained writes them, and of adapters to it, each a
            further model; no code in them is run.
        tp: Ranks that share the model.
        dp: Replicas of the model, over tp ranks each; a request goes to the one with the fewest.
        dtype: Of the weights, such as bfloat16. Default: the config's.
        host: Address to listen on.
        port: Port to listen on.
        api_key: Key that clients must show. Default: the variable AUTOTP_API_KEY, or none.
        origin: Origin of pages whose scripts may ask, such as https://chat.example.com. Repeatable.
        max_tokens: New tokens of an answer at most, and where a request does not say how many.
        concurrent: Answers at once; who asks for more is told to come again (429).
        pool: Tokens of all requests whose keys and values are kept. Default: as memory allows.
        cluster: To plan for: a preset or file; of unlike devices one that says them rank by rank. Default: h100.
    """
    if missing := [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]:
        raise InputError(f"serving needs {', '.join(missing)}: pip install 'autotp[serve]'.")
    from autotp.serving.rank import Options, model_name  # noqa: PLC0415
    from autotp.serving.rank import serve as launch  # noqa: PLC0415  torch and the server, only where they are used

    from .models import read_dtype  # noqa: PLC0415

    key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "")
    kind, origins = read_dtype(dtype), tuple(origin or ())
    for at, folder in enumerate(folders):
        if not (folder / FOLDER_FILES[at > 0]).is_file():
            raise InputError(
                f"{folder} holds no {FOLDER_FILES[at > 0]}. Give the model's folder, then those of adapters."
            )
    if len({*map(model_name, folders)}) < len(folders):
        raise InputError("two folders have one name, by which requests ask for a model. Rename one.")
    launch(Options(folders, tp, dp, kind, host, port, key, origins, max_tokens, concurrent, pool, cluster))
    screen.say("stopped")
    return FINE
