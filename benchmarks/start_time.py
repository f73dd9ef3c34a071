"""CPU seconds of all ranks from the module to the sharded module: each captures, one does, or with a saved plan.

    python -m benchmarks.start_time           # prints the table and a JSON line
    python -m benchmarks.start_time --write   # and the section of docs/performance.md

Eight local ranks over gloo, or `--tp` others, Llama shapes on the meta device. The ways are measured one after the
other, in turns, each in processes of its own. The plan is saved before, and its reading counts; with it rank 0
captures, and nothing is solved. Beside it `autotp.plan` in one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
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

HEADING = "Start on {tp} ranks"
TP, LIMIT, ROUNDS = 8, 1800.0, 3
MODELS = ("8B shape, 2 layers", "Llama-8B")
WAYS = {"each": "each rank captures", "once": "one does", "saved": "with a saved plan", "unchecked": "and no check"}


def shard(name: str, tp: int, way: str, send: Send) -> None:
    """Measure CPU seconds of all ranks, of the busiest, and of one process that plans and saves.

    Args:
        name: of the shapes. tp: number of ranks.
        way: "each" rank captures, "once" for all, likewise by a "saved" plan, or by one and "unchecked".
    """
    model = build(name)
    with tempfile.TemporaryDirectory() as folder:
        planned = _forked(_plan, model, tp, f"{folder}/plan.json")[0]
        seconds = _forked(_rank, model, tp, folder, way, times=tp)
    send({"all": sum(seconds), "busiest": max(seconds), "plan": planned})


def _forked(work: Any, *given: Any, times: int = 1) -> list[float]:
    """CPU seconds of processes that do the same, each of which is told its number."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, results, *given)) for rank in range(times)]
    for each in ranks:
        each.start()
    seconds = [results.get() for _ in ranks]
    for each in ranks:
        each.join()
    return seconds


def _plan(_: int, results: Any, model: Any, tp: int, path: str) -> None:
    began = time.process_time()
    autotp.plan(model, tp).save(path)
    results.put(time.process_time() - began)
    os._exit(0)


def _rank(rank: int, results: Any, model: Any, tp: int, folder: str, way: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp)
    alone = patch("autotp.driver.compile.capture_key", lambda *_: (None, "asked for by the benchmark"))
    began = time.process_time()
    if way == "each":
        with alone:
            autotp.compile(model, tp)
    elif way == "once":
        autotp.compile(model, tp)
    else:
        check = None if way == "saved" else False
        autotp.compile(model, plan=autotp.Plan.load(f"{folder}/plan.json"), check_capture=check)
    results.put(time.process_time() - began)
    dist.barrier()
    os._exit(0)


def measured(name: str, tp: int, rounds: int) -> Record:
    """Medians over rounds, in each of which all ways run."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for way in WAYS:
            record, why = isolate.run(shard, name, tp, way, limit=LIMIT, parent=True)
            if why:
                raise RuntimeError(f"{name}: {why}")
            for key, value in record.items():
                found[f"{key}_{way}"].append(value)
    return {key: round(statistics.median(values), 2) for key, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--tp", type=int, default=TP, help=f"number of ranks (default {TP})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all ways (default {ROUNDS})")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    console = Console(stderr=True)
    models = track(MODELS, "measuring", console=console, transient=True)
    results = {name: measured(name, given.tp, given.rounds) for name in models}
    head = "", *WAYS.values(), *(f"busiest: {words}" for words in WAYS.values()), "plan alone"
    keys = *(f"all_{way}" for way in WAYS), *(f"busiest_{way}" for way in WAYS), "plan_once"
    shown = table(head, [[n, *(f"{r[k]:.2f}" for k in keys)] for n, r in results.items()])
    record = {"benchmark": "start_time", **made("benchmarks.start_time", arguments), "load_before": round(before, 1)}
    record |= {"tp": given.tp, "rounds": given.rounds, "models": results}
    print(shown)
    if given.write:
        write_section(HEADING.format(tp=given.tp), f"{_text(record)}\n\n{shown}")
    print(json.dumps(record))


def _text(record: Record) -> str:
    loaded = ", a loaded machine" if record["load_before"] > (os.cpu_count() or 1) else ""
    return (
        f"`{record['command']}`: CPU seconds of {record['tp']} local ranks together, from the module to the sharded "
        f"module, median\nof {record['rounds']} (the ways in turns, processes of their own). {os.cpu_count()} cores of "
        f"{record['machine']};\n{versions(record)}, {record['date']}, load average {record['load_before']} before the "
        f"run{loaded}."
    )


if __name__ == "__main__":
    main()
