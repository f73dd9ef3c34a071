"""Peers beside autotp in one run, the packages themselves: `make peers` (`python -m benchmarks.peers [--write]`).

On two gloo ranks of one thread each, with the Llama of benchmarks.step_time: first each by itself, whose losses over
some updates must be one device's, with its set-up, bytes, kept activations and memory; then their steps in turns.
Runs are repeated in new processes; the ratio to autotp is the median over runs, with the range.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import Times
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.performance import ROOT, table, write_section
from benchmarks.helpers.together import together as put_together
from benchmarks.results import parts_of

from . import architectures, measured, planners
from .legs import AUTOTP, CORE, DECODE, PLAN, SPEED, STYLES, TRAIN, WRITTEN, base_of, chosen, lines

HEADING = "Beside the packages themselves"
SHAPE, LENGTH, PROMPT, RANKS, RUNS, ROUNDS = Shape(), 256, 128, 2, 7, 15
RATIO = "autotp's of it", "least to most"
CLOSE = 1e-5  # of a loss: float32 sums in another order, over some updates
PACKAGES = {
    CORE: "megatron-core",
    SPEED: "deepspeed",
    PLAN: "transformers",
    STYLES: "torch",
    "accelerate": "accelerate",
}


def one_device(shape: Shape, length: int) -> list[float]:
    """Return the losses of the updates on one device."""
    model, (ids, targets) = untouched(shape), measured.data(shape, length)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=measured.RATE), []
    for _ in range(measured.UPDATES):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def part(folder: Path, name: str, work: Any) -> Any:
    """Return what was found before under this name, or find it."""
    file = folder / f"{name}.json"
    if not file.exists():
        file.write_text(json.dumps(work()))
    return json.loads(file.read_text())


def run(shape: Shape, length: int, given: argparse.Namespace) -> Record:
    """Measure all of it, on from where it stopped; see `page` for what is found."""
    names, decoders = chosen(TRAIN, given.only), chosen(DECODE, given.only)
    wanted = part(given.folder, "one-device", lambda: one_device(shape, length))
    alone: dict[str, Any] = {}
    for name in names:
        work = functools.partial(measured.alone, name, shape, length)
        alone[name] = max(part(given.folder, f"alone-{_slug(name)}", lambda: on_ranks(work, RANKS)), key=_peak)  # noqa: B023
        if "losses" in alone[name]:
            off = max(abs(a / b - 1) for a, b in zip(alone[name]["losses"], wanted, strict=True))
            alone[name] |= {"off": off} if off <= CLOSE else {"refused": f"its losses are {off:.1e} off one device's"}
    kept = [name for name in names if "refused" not in alone[name]]
    trained, decoded = [], []
    for i in range(given.runs):
        found: list[Record] = [{} for _ in range(RANKS)]
        for base in dict.fromkeys(map(base_of, kept)):  # each kind of step in processes of its own
            same = [name for name in kept if base_of(name) == base]
            work = functools.partial(measured.together, same, shape, length, given.rounds)
            times = part(given.folder, f"trained-{i}-{_slug(base)}", lambda: on_ranks(work, RANKS))  # noqa: B023
            found = [one | other for one, other in zip(found, times, strict=True)]
        trained.append(found)
        work = functools.partial(measured.decoded, decoders, shape, PROMPT, given.rounds)
        decoded.append(part(given.folder, f"decoded-{i}", lambda: on_ranks(work, RANKS)))  # noqa: B023
    out: Record = {"alone": alone, "steps": spread(trained, kept)}
    decodes = [[rank["times"] for rank in one] for one in decoded]
    out["decoded"] = spread(decodes, list(decodes[0][0])) if decodes else {}
    out["not_decoded"] = decoded[0][0]["refused"] if decoded else {}
    out["architectures"] = part(given.folder, "architectures", architectures.run)
    out["planners"] = part(given.folder, "planners", planners.run)
    return out


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _peak(found: Mapping[str, Any]) -> int:
    return found.get("peak", 0)


def spread(runs: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str]) -> dict[str, Record]:
    """Return by leg its seconds, and autotp's CPU seconds over its own: median, least and most of the runs."""
    out: dict[str, Record] = {}
    for name in names:
        base = base_of(name)
        if base not in names:
            continue
        rows = []
        for ranks in runs:
            mine, its = ([Times(**rank[x]) for rank in ranks] for x in (base, name))
            rows.append(put_together(its, its) | {"ratio": put_together(mine, its)["cpu_ratio"]})
        ratios = [row["ratio"] for row in rows]
        out[name] = {key: statistics.median(row[key] for row in rows) for key in ("cpu_s", "wall_s", "ratio")}
        out[name] |= {"least": min(ratios), "most": max(ratios)}
    return out


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    rows, refused = [], []
    for name, one in record["alone"].items():
        if "refused" in one:
            refused.append(f"* {name}: {one['refused']}")
            continue
        step = record["steps"].get(name)
        cells = [f"{step['cpu_s']:.3f}" if step else "-", *_ratio(step), f"{one['set_up_s']:.1f}"]
        cells.append(f"{one['sent'] / 1e6:.1f}" if one.get("sent") else "-")
        cells += [f"{one['kept'] / 1e6:.0f}" if "kept" in one else "-", f"{one['peak'] / 1e6:.0f}"]
        rows.append([name, *cells, str(lines(WRITTEN[name.split(", ")[0]]))])
    refused += [f"* {name}, a decoded token: {why}" for name, why in record["not_decoded"].items()]
    head = ["a training step", "CPU, s", *RATIO, "set-up, CPU s", "sent, MB", "kept, MB", "peak, MB", "lines"]
    decoded = [[name, f"{one['cpu_s'] * 1e3:.1f}", *_ratio(one)] for name, one in record["decoded"].items()]
    not_run = "\n".join(refused)
    spent = {name: one["spent"] for name, one in record["alone"].items() if "spent" in one}
    keys = "products", "others", "collectives", "step"
    parts = [[name, *(f"{one[key] * 1e3:.0f}" for key in keys)] for name, one in spent.items()]
    roofline = record["alone"].get(AUTOTP, {}).get("roofline_s", math.nan)
    s = SHAPE
    return f"""\
`{record["command"]}`: the packages themselves ({record["packages"]}), with the Llama of
[step time](#step-time-beside-a-hand-written-module) (hidden {s.hidden}, {s.layers} layers, {LENGTH} tokens, float32) on
{RANKS} gloo processes of one thread each. Each has the losses of one device over {measured.UPDATES} updates by SGD
within {CLOSE:.0e}, or is not timed. CPU seconds of both ranks, medians of {record["runs"]} runs of {record["rounds"]}
interleaved rounds; "autotp's of it" is autotp's CPU seconds over the peer's in the same rounds: the median of the runs,
and least to most of them. Set-up: CPU seconds of a rank from the whole model to the end of the first step, with empty
caches of what is compiled. Sent: bytes of a rank in a step, by torch's collectives. Kept: what autograd saves of a
forward with the loss, on a rank. Peak: the most memory that a rank held, over that with the whole model before.
Lines: what a user writes beside the loop. Megatron-Core's attention is not one fused operator here; cross entropy is
torch's, of whole logits, for all. {record["cores"]} cores of {record["machine"]}; torch {record["torch"]},
transformers {record["transformers"]}, Python {record["python"]}, {record["date"]}, load average
{record["load_before"]} before.

{table(head, rows)}
Where a rank's step goes, in ms by torch's profiler: matrix products, other operators, and collectives with waiting for
the other rank; and the CPU ms of a step without the profiler. The products' arithmetic alone would take
{roofline * 1e3:.0f} ms at the rate that `autotp.calibrate` finds with both ranks at work:

{table(["a training step", "products", "other operators", "collectives", "CPU of a step"], parts)}
A token after a prompt of {PROMPT}, with transformers' dynamic cache. DeepSpeed sums through memory that the processes
of one host share, by an operator that it compiles for CPUs; *over gloo* it sums as all others do:

{table(["a decoded token", "CPU, ms", "autotp's token of it", RATIO[1]], decoded)}
{architectures.page(record["architectures"])}
{planners.page(record["planners"])}
Not measured:

{not_run or "nothing."}
"""


def _ratio(one: Mapping[str, Any] | None) -> tuple[str, str]:
    return (f"{one['ratio']:.3f}", f"{one['least']:.3f} to {one['most']:.3f}") if one else ("-", "-")


def packages() -> str:
    """Return the peers' versions, and which are not installed."""
    found = []
    for package in dict.fromkeys(PACKAGES.values()):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} is not installed")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"in new processes (default {RUNS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of a run (default {ROUNDS})")
    parser.add_argument("--only", nargs="+", default=[], choices=[CORE, SPEED, STYLES, PLAN], help="these peers")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="what is done already")
    parser.add_argument("--tiny", action="store_true", help="a model of tiny sizes, to try the code")
    given = parser.parse_args(arguments)
    given.folder = parts_of(given.folder, "beside-the-packages-themselves", "benchmarks/peers")
    if not importlib.util.find_spec("megatron"):
        print(
            "Megatron-Core and DeepSpeed are not installed here: `make peers` runs this in an environment that has them"
        )
    load = part(given.folder, "load", lambda: round(os.getloadavg()[0], 1))  # before the first part
    shape = Shape(64, 2, 8, 4, 96, 128) if given.tiny else SHAPE
    record = {"benchmark": "peers", **made("benchmarks.peers", arguments), "cores": os.cpu_count()}
    record |= {"runs": given.runs, "rounds": given.rounds, "load_before": load, "packages": packages()}
    record |= run(shape, 32 if given.tiny else LENGTH, given)
    print(page(record))
    if given.write:
        write_section(HEADING, page(record))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
