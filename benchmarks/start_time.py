"""CPU seconds of all ranks from the module to the sharded module: one rank captures, or each for itself.

    python -m benchmarks.start_time           # prints the table and a JSON line
    python -m benchmarks.start_time --write   # and the section of docs/performance.md

Eight local ranks over gloo, Llama shapes on the meta device. The two ways are measured one after the other, in turns,
each in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console
from rich.progress import track

import autotp

from .helpers import isolate
from .helpers.command import made, versions
from .helpers.isolate import Record, Send
from .helpers.performance import table, write_section
from .plan_time import build

HEADING = "Start on eight ranks"
TP, LIMIT, ROUNDS = 8, 1800.0, 3
MODELS = ("8B shape, 2 layers", "Llama-8B")


def shard(name: str, once: bool, send: Send) -> None:
    """CPU seconds of all ranks, and of the busiest.

    Args:
        name: of the shapes. once: whether one rank captures for all.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.SimpleQueue()
        model = build(name)
        ranks = [
            context.Process(target=_rank, args=(model, rank, f"file://{folder}/store", once, results))
            for rank in range(TP)
        ]
        for each in ranks:
            each.start()
        seconds = [results.get() for _ in ranks]
        for each in ranks:
            each.join()
    send({"all": sum(seconds), "busiest": max(seconds)})


def _rank(model: Any, rank: int, store: str, once: bool, results: Any) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=TP)
    alone = patch("autotp.runtime.build.capture_key", lambda *_: (None, "asked for by the benchmark"))
    began = time.process_time()
    if once:
        autotp.compile(model, TP)
    else:
        with alone:
            autotp.compile(model, TP)
    results.put(time.process_time() - began)
    dist.barrier()
    os._exit(0)


def measured(name: str, rounds: int) -> Record:
    """Medians over rounds, in each of which both ways run."""
    found: dict[str, list[float]] = {"each": [], "once": [], "busiest_each": [], "busiest_once": []}
    for _ in range(rounds):
        for once in (False, True):
            record, why = isolate.run(shard, name, once, limit=LIMIT, parent=True)
            if why:
                raise RuntimeError(f"{name}: {why}")
            way = "once" if once else "each"
            found[way].append(record["all"])
            found[f"busiest_{way}"].append(record["busiest"])
    return {key: round(statistics.median(values), 2) for key, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of both ways (default {ROUNDS})")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    console = Console(stderr=True)
    results = {n: measured(n, given.rounds) for n in track(MODELS, "measuring", console=console, transient=True)}
    head = "", "each rank captures", "one rank captures", "ratio", "busiest rank before", "now"
    keys = "each", "once", "ratio", "busiest_each", "busiest_once"
    rows = {n: {**r, "ratio": round(r["once"] / r["each"], 2)} for n, r in results.items()}
    shown = table(head, [[n, *(f"{r[k]:.2f}" for k in keys)] for n, r in rows.items()])
    record = {"benchmark": "start_time", **made("benchmarks.start_time", arguments), "load_before": round(before, 1)}
    record |= {"tp": TP, "rounds": given.rounds, "models": rows}
    print(shown)
    if given.write:
        write_section(HEADING, f"{_text(record)}\n\n{shown}")
    print(json.dumps(record))


def _text(record: Record) -> str:
    loaded = ", a loaded machine" if record["load_before"] > (os.cpu_count() or 1) else ""
    return (
        f"`{record['command']}`: CPU seconds of {TP} local ranks together, from the module to the sharded module, "
        f"median\nof {record['rounds']} (the two ways in turns, processes of their own). {os.cpu_count()} cores of "
        f"{record['machine']};\n{versions(record)}, {record['date']}, load average {record['load_before']} before the "
        f"run{loaded}."
    )


if __name__ == "__main__":
    main()
