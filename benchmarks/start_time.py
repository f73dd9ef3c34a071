"""CPU seconds of all ranks from the module to the sharded module: each captures, one does, or none by the cache.

    python -m benchmarks.start_time           # prints the table and a JSON line
    python -m benchmarks.start_time --write   # and the section of docs/performance.md

Eight local ranks over gloo, Llama shapes on the meta device. The ways are measured one after the other, in turns,
each in processes of its own; the cache is filled by a start of its own before. Beside it `autotp.plan` in one process,
the first time and from that cache.
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

HEADING = "Start on eight ranks"
TP, LIMIT, ROUNDS = 8, 1800.0, 3
MODELS = ("8B shape, 2 layers", "Llama-8B")
WAYS = ("each", "once", "disk")
BUSIEST = ("before", "one", "disk")


def shard(name: str, way: str, send: Send) -> None:
    """CPU seconds of all ranks, of the busiest, and of one process that plans.

    Args:
        name: of the shapes. way: "each" rank captures, "once" for all, or "disk", from the cache of an earlier start.
    """
    model = build(name)
    with tempfile.TemporaryDirectory() as cache:
        if way == "disk":
            os.environ["AUTOTP_CACHE"] = cache
            _started(model, way)
            _forked(_plan, model)
        seconds = _started(model, way)
        send({"all": sum(seconds), "busiest": max(seconds), "plan": _forked(_plan, model)[0]})


def _started(model: Any, way: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return _forked(_rank, model, f"file://{folder}/store", way, times=TP)


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


def _plan(_: int, results: Any, model: Any) -> None:
    began = time.process_time()
    autotp.plan(model, TP)
    results.put(time.process_time() - began)
    os._exit(0)


def _rank(rank: int, results: Any, model: Any, store: str, way: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=TP)
    alone = patch("autotp.runtime.build.capture_key", lambda *_: (None, "asked for by the benchmark"))
    began = time.process_time()
    if way == "each":
        with alone:
            autotp.compile(model, TP)
    else:
        autotp.compile(model, TP)
    results.put(time.process_time() - began)
    dist.barrier()
    os._exit(0)


def measured(name: str, rounds: int) -> Record:
    """Medians over rounds, in each of which all ways run."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for way in WAYS:
            record, why = isolate.run(shard, name, way, limit=LIMIT, parent=True)
            if why:
                raise RuntimeError(f"{name}: {why}")
            for key, value in record.items():
                found[f"{key}_{way}"].append(value)
    return {key: round(statistics.median(values), 2) for key, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all ways (default {ROUNDS})")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    console = Console(stderr=True)
    results = {n: measured(n, given.rounds) for n in track(MODELS, "measuring", console=console, transient=True)}
    head = "", "each rank captures", "one does", "ratio", "from disk", "ratio", *(f"busiest {x}" for x in BUSIEST)
    rows = {
        n: {**r, **{f"ratio_{w}": round(r[f"all_{w}"] / r["all_each"], 2) for w in WAYS}} for n, r in results.items()
    }
    keys = "all_each", "all_once", "ratio_once", "all_disk", "ratio_disk", *(f"busiest_{way}" for way in WAYS)
    keys = *keys, "plan_once", "plan_disk"
    shown = table((*head, "plan", "again"), [[n, *(f"{r[k]:.2f}" for k in keys)] for n, r in rows.items()])
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
        f"median\nof {record['rounds']} (the ways in turns, processes of their own). {os.cpu_count()} cores of "
        f"{record['machine']};\n{versions(record)}, {record['date']}, load average {record['load_before']} before the "
        f"run{loaded}."
    )


if __name__ == "__main__":
    main()
