"""From 8 devices to 2,048 by the cost model, and the program of one rank of Llama-405B, built here.

    python -m benchmarks.predicted.scaling           # prints both tables
    python -m benchmarks.predicted.scaling --write   # and their sections of docs/performance.md

The first plans Llama 3.1's shapes at tp=8, fully sharded over the other devices, some sequences for each tp group: more
devices take more sequences. The second compiles a model without weights as rank 0 of torch's "fake" process group,
which sends nothing, and runs a step of it on fake tensors, which compute nothing; its collectives are counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autotp
from autotp.text import amount, seconds
from benchmarks.helpers import isolate
from benchmarks.helpers.command import made, versions
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.llama.variants import sent, training_step
from benchmarks.helpers.performance import table, write_section
from benchmarks.lists.hand_plans import FakeStore
from benchmarks.plan_time import build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MODELS = ("Llama-70B", "Llama-405B")
TP, LENGTH, CLUSTER, LIMIT = 8, 8192, "h100", 900.0
PREDICTED, PROGRAM = "8 to 2,048 devices, predicted", "One rank of Llama-405B"


def predicted(name: str, devices: int, send: Send) -> None:
    """The figures of the plan for so many devices; for `isolate.run`."""
    ids, dp = torch.zeros(1, LENGTH, dtype=torch.long), devices // TP
    batch = {"input_ids": ids, "labels": ids}
    plan = autotp.plan(
        build(name).train(), TP, dp=dp, fully_shard=dp > 1, example_inputs=batch, cluster=CLUSTER, check_capture=False
    )
    totals, terms = plan.totals, plan.totals.terms
    tp = terms["communication"] - terms.get("hidden", 0.0) - terms.get("bucketed", 0.0)
    send({"step": plan.totals.seconds, "tp": tp, "waiting": terms.get("waiting", 0.0), "dp": plan.batch.sent,
          "memory": plan.memory.peak, "tokens": totals.examples * totals.length * dp})  # fmt: skip


def program(name: str, send: Send) -> None:
    """The figures of rank 0's program; for `isolate.run`."""
    send({**dry_run(build(name).train(), torch.zeros(1, LENGTH, dtype=torch.long), TP), "peak": peak_memory()})


def dry_run(model: nn.Module, ids: Tensor, tp: int, **options: Any) -> Record:
    """Compile a model without weights as rank 0 of a group that sends nothing, and count a step on fake tensors.

    Args:
        model: on the meta device. ids: token numbers (batch, length). tp: ranks. options: of `autotp.compile`.

    Returns:
        CPU seconds of `build` and `step`; bytes that the rank would `held`, and that it sends in a step: `counted` and
        `planned`; the number of `calls` of collectives.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        began = time.process_time()
        sharded: Any = autotp.compile(
            model, tp, example_inputs={"input_ids": ids}, cluster=CLUSTER, check_capture=False, **options
        )
        built = time.process_time()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # its own are on the meta device
            sharded.to_empty(device="cpu")
            calls, counted = sent(training_step(sharded, mode.from_tensor(ids), mode.from_tensor(ids)), tp)
        ran, totals = time.process_time(), sharded.plan.totals
        held = sum(p.to_local().nbytes for p in sharded.parameters())
    finally:
        dist.destroy_process_group()
    return {"build": built - began, "step": ran - built, "held": held, "calls": sum(calls.values()),
            "counted": counted, "planned": totals.sent}  # fmt: skip


def peak_memory() -> int:
    """Of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(function: Any, *arguments: Any) -> Record:
    """What a measurement sends from a process of its own."""
    record, why = isolate.run(function, *arguments, limit=LIMIT)
    if why:
        raise RuntimeError(f"{arguments}: {why}")
    return record


def predicted_rows(models: Sequence[str], devices: Sequence[int]) -> list[list[str]]:
    """Of the first table: each model at each number of devices."""
    cases = [(name, n) for name in models for n in devices]
    rows = []
    for name, n in track(cases, "planning", console=Console(stderr=True), transient=True):
        found = run(predicted, name, n)
        step, tokens = found["step"], found["tokens"]
        cells = (f"{TP} x {n // TP}", seconds(step), f"{found['tp'] / step:.0%}", f"{found['waiting'] / step:.0%}")
        sizes = (amount(found["dp"]), amount(found["memory"]))
        rows.append([name, f"{n:,}", *cells, *sizes, f"{tokens / step:,.0f}", f"{tokens / step / n:,.0f}"])
    return rows


def predicted_table(rows: Sequence[Sequence[str]]) -> str:
    """The first table."""
    head = ("", "devices", "tp x dp", "step", "over tp", "waiting for dp", "sent over dp", "memory", "tokens/s",
            "a device")  # fmt: skip
    return (
        "Sequences of 8192 tokens: one at dp=1, otherwise two for each tp group. Memory is without recomputing.\n\n"
        + table(head, rows)
    )


def program_table(found: Mapping[str, float]) -> str:
    """The second table."""
    rows = {
        "module to sharded module, CPU s": f"{found['build']:.1f}",
        "a step of training on fake tensors, CPU s": f"{found['step']:.1f}",
        "peak memory of the process": amount(found["peak"]),
        "weights that the rank would hold": amount(found["held"]),
        "collectives in the step": f"{found['calls']:,.0f}",
        "bytes sent in the step, counted": f"{found['counted']:,.0f}",
        "the same by the plan": f"{found['planned']:,.0f}",
    }
    return table(("", ""), rows.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the sections of docs/performance.md")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES, help=f"multiples of {TP}")
    given = parser.parse_args(arguments)
    sections = {
        PREDICTED: predicted_table(predicted_rows(given.models, given.devices)),
        PROGRAM: program_table(run(program, "Llama-405B")),
    }
    record = made("benchmarks.predicted.scaling", arguments)
    for title, shown in sections.items():
        print(f"{title}\n\n{shown}")
        if given.write:
            write_section(title, f"{told(record)}\n\n{shown}", PAGE)


def told(record: Mapping[str, str]) -> str:
    """What the tables were made with."""
    return (
        f"`{record['command']}`: {record['date']}, {versions(record)},\n{os.cpu_count()} cores of {record['machine']}."
    )


if __name__ == "__main__":
    main()
