"""Communication under arithmetic on a slow link, as a timeline: `python -m benchmarks.overlap [--write]`.

Two gloo processes of one thread each train Llama blocks, plain and sequence-parallel. The link between them is slowed
down: what a collective gives may be read only when a link of the given latency and bandwidth, which carries one thing
at a time, would have brought it. Nobody computes for that, so what a step waits for is what communication it exposes.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.comm import collectives
from autotp.cost.collective_costs import collective_bytes
from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import difference, local_gradients, training_step
from benchmarks.helpers.performance import PAGE, table, write_section

HEADING = "Communication under arithmetic"
SHAPE = Shape(layers=2, vocabulary=1024)
BATCH, LENGTH, RANKS, ROUNDS = 2, 256, 2, 9
LATENCY, BANDWIDTH = 2e-4, 4e7  # seconds, bytes a second
TRACE = PAGE.parent / "assets" / "overlap-trace.json"
SHOWN = 5e-4  # seconds from which an operator is in the trace
CLOSE = 2e-4  # of the largest gradient: float32 sums in another order
CASES: dict[str, tuple[bool, dict[str, bool]]] = {
    "plain": (False, {"overlap": False}),
    "plain, overlapped": (False, {"overlap": True}),
    "sequence-parallel": (True, {"overlap": False}),
    "sequence-parallel, overlapped": (True, {"overlap": True}),
    "sequence-parallel, regathered": (True, {"overlap": False, "regather": True}),
    "sequence-parallel, overlapped and regathered": (True, {"overlap": True, "regather": True}),
}


@dataclass
class Span:
    """What a track shows: its name, and from when to when by the clock."""

    track: str
    name: str
    start: float
    end: float


@dataclass
class Link:
    """A link that carries one collective after another, and what was seen of it."""

    latency: float = LATENCY
    bandwidth: float = BANDWIDTH
    free: float = 0.0
    ready: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def between(self) -> Iterator[None]:
        """Within this context all collectives of autotp go over it."""
        start, finish = collectives.start, collectives.finish

        def begun(primitive: Any, x: Tensor, reduction: str, *, tp: int, group: str) -> Tensor:
            out = start(primitive, x, reduction, tp=tp, group=group)
            self._send(primitive, x, tp, out)
            return out

        def waited(primitive: Any, started: Tensor, dtype: torch.dtype, group: str) -> Tensor:
            began = time.perf_counter()
            out = finish(primitive, started, dtype, group)
            ready = self.ready.pop(id(started))[1]
            time.sleep(max(0.0, ready - time.perf_counter()))
            self.spans.append(Span("waiting", primitive, began, max(began, ready)))  # not for a rank that is late
            return out

        def both(
            primitive: Any, x: Tensor, reduction: str, *, tp: int, group: str, peers: Any = (), rows: Any = None
        ) -> Tensor:
            assert not peers and rows is None  # of all ranks alike
            return waited(primitive, begun(primitive, x, reduction, tp=tp, group=group), x.dtype, group)

        with ExitStack() as stack:
            for name, function in {"start": begun, "finish": waited, "real": both}.items():
                stack.enter_context(patch.object(collectives, name, function))
            yield

    def _send(self, primitive: Any, x: Tensor, tp: int, out: Tensor) -> None:
        whole = x.nbytes * (tp if primitive == "all_gather" else 1)
        sent = collective_bytes(primitive, whole, tp)
        begins = max(time.perf_counter(), self.free)
        self.free = begins + self.latency + sent / self.bandwidth
        self.ready[id(out)] = out, self.free
        self.spans.append(Span("communication", f"{primitive}, {sent / 1e6:.2f} MB", begins, self.free))

    def taken(self, track: str) -> float:
        """Seconds in a track since the last `clear`."""
        return sum(s.end - s.start for s in self.spans if s.track == track)


class Operators(TorchDispatchMode):
    """Notes the operators that take long."""

    def __init__(self, spans: list[Span]) -> None:
        super().__init__()
        self.spans = spans

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        ended = time.perf_counter()
        if ended - began > SHOWN and func.namespace == "aten":
            self.spans.append(Span("compute", str(func).removesuffix(".default"), began, ended))
        return out


def cluster() -> autotp.Cluster:
    """This machine with such a link, for the cost model."""
    local = autotp.Cluster.preset("local")
    return replace(
        local, name="slow link", intra_latency=LATENCY, intra_bandwidth=BANDWIDTH, source="benchmarks/overlap.py"
    )


def measure(rounds: int) -> Record:
    """This rank's figures of every case, and the trace of one step of each."""
    found, spans = compared(rounds)
    return {"cases": found, "trace": trace(spans)}


def compared(rounds: int) -> tuple[Record, dict[str, list[Span]]]:
    """This rank's figures of every case, and the spans of one step of each."""
    torch.manual_seed(0)
    model = untouched(SHAPE)
    ids, targets = torch.randint(SHAPE.vocabulary, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    link, steps, wanted = Link(), {}, {}
    found: Record = {name: {"communication": [], "waiting": []} for name in CASES}
    for name, (sequence, switches) in CASES.items():
        sharded = autotp.compile(
            model, RANKS, example_inputs=ids, sequence_parallel=sequence, cluster=cluster(), optimise=switches,
            check_capture=False,
        )  # fmt: skip
        step = training_step(sharded, ids, targets)
        mine = {"loss": step().detach(), **local_gradients(sharded)}
        base = wanted.setdefault(sequence, {k: x.clone() for k, x in mine.items()})
        found[name] |= {"off": difference(mine, base), "fired": str(sharded.plan).partition("overlap: ")[2]}
        steps[name] = _noted(step, link, found[name])
    with link.between():
        times = interleaved(steps, rounds, before=dist.barrier)
        spans = {name: _traced(step, link) for name, step in steps.items()}
    for name, own in times.items():
        found[name]["wall"] = own.wall
        found[name] |= {k: found[name][k][1 : rounds + 1] for k in ("communication", "waiting")}
    return found, spans


def _noted(step: Callable[[], Any], link: Link, into: Record) -> Callable[[], None]:
    def run() -> None:
        link.spans.clear()
        step()
        for track in ("communication", "waiting"):
            into[track].append(link.taken(track))

    return run


def _traced(step: Callable[[], None], link: Link) -> list[Span]:
    """The spans of one step, from its beginning."""
    dist.barrier()
    began, compute = time.perf_counter(), []
    with Operators(compute):
        step()
    return [replace(s, start=s.start - began, end=s.end - began) for s in [*compute, *link.spans]]


def trace(spans: dict[str, list[Span]]) -> Record:
    """A Chrome trace with a process for each case, which ui.perfetto.dev and chrome://tracing open."""
    tracks, rows = ("compute", "communication", "waiting"), []
    for at, (case, own) in enumerate(spans.items()):
        rows.append({"name": "process_name", "ph": "M", "pid": at, "tid": 0, "args": {"name": case}})
        for i, track in enumerate(tracks):
            rows.append({"name": "thread_name", "ph": "M", "pid": at, "tid": i, "args": {"name": track}})
        for s in own:
            times = {"ts": round(1e6 * s.start), "dur": round(1e6 * (s.end - s.start))}
            rows.append({"name": s.name, "ph": "X", "cat": s.track, "pid": at, "tid": tracks.index(s.track), **times})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def run(rounds: int = ROUNDS) -> tuple[Record, str]:
    """A row for every case, and the trace as text."""
    everyone = on_ranks(functools.partial(measure, rounds), RANKS)
    rows = {name: _row([found["cases"][name] for found in everyone]) for name in CASES}
    return rows, json.dumps(everyone[0]["trace"])


def _row(ranks: Sequence[Record]) -> Record:
    """Medians over the rounds: of the slower rank's seconds, and of the ranks' mean."""
    wall = [max(x) for x in zip(*(r["wall"] for r in ranks), strict=True)]
    mean = {
        k: [statistics.mean(x) for x in zip(*(r[k] for r in ranks), strict=True)] for k in ("communication", "waiting")
    }
    return {
        "wall_s": round(statistics.median(wall), 4),
        "communication_s": round(statistics.median(mean["communication"]), 4),
        "waiting_s": round(statistics.median(mean["waiting"]), 4),
        "exposed": round(statistics.median(map(operator.truediv, mean["waiting"], mean["communication"])), 3),
        "of_step": round(statistics.median(map(operator.truediv, mean["waiting"], wall)), 3),
        "off": max(r["off"] for r in ranks),
        "fired": " ".join(ranks[0]["fired"].split()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md, and the trace")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    parser.add_argument("--trace", type=Path, help="write the timeline to this file, a Chrome trace")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    rows, timeline = run(given.rounds)
    record = {"benchmark": "overlap", **made("benchmarks.overlap", arguments), "cores": os.cpu_count()}
    record |= {"rounds": given.rounds, "load_before": round(before, 1), "rows": rows}
    print(page(record))
    print(json.dumps(record))
    if off := [name for name, row in rows.items() if row["off"] > CLOSE]:
        raise RuntimeError(f"{off[0]} computes something else: loss or gradients are {rows[off[0]]['off']} off")
    for path in filter(None, (given.trace, TRACE if given.write else None)):
        path.write_text(timeline)
    if given.write:
        write_section(HEADING, page(record))


def page(record: Record) -> str:
    """The section of docs/performance.md."""
    head = ["", "step, s", "on the link, s", "waited for, s", "exposed", "of the step"]
    cells = [
        [name, f"{r['wall_s']:.3f}", f"{r['communication_s']:.3f}", f"{r['waiting_s']:.3f}", f"{r['exposed']:.2f}",
         f"{r['of_step']:.2f}"]
        for name, r in record["rows"].items()
    ]  # fmt: skip
    s = SHAPE
    text = f"""`{record["command"]}`: forward, cross entropy and backward of {s.layers} Llama blocks (hidden {s.hidden},
        {s.heads} heads with {s.kv_heads} of keys and values, feed-forward {s.wide}, {s.vocabulary} words, {BATCH} x
        {LENGTH} tokens), float32, over {RANKS} gloo processes of one thread each, on a link of {1e3 * LATENCY:g} ms and
        {BANDWIDTH / 1e6:g} MB/s: what a collective gives is held back until such a link would have brought it, without
        work for a processor. The cost model knows the link, and chose the chunks. "Waited for": time in which a rank
        waits for the link and computes nothing; its part of the time on the link is what is exposed. Medians of
        {record["rounds"]} interleaved rounds, the clock of the slower rank. Loss and gradients are compared first. A
        step of each as a timeline: [overlap-trace.json](assets/overlap-trace.json), for ui.perfetto.dev.
        {record["cores"]} cores of {record["machine"]}; torch {record["torch"]}, Python {record["python"]},
        {record["date"]}, load average {record["load_before"]} before."""
    filled = textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)
    return f"{filled}\n\n{table(head, cells)}"


if __name__ == "__main__":
    main()
