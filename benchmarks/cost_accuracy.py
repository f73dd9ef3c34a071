"""Predicted against measured step time on local gloo ranks: `python -m benchmarks.cost_accuracy [--write]`.

For each tp, so many processes of one thread calibrate a cluster together, then plan and run forward and backward of a
two-layer decoder in eight shapes. The prediction is the plan's `totals.passes` on that cluster.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import autotp
from autotp.comm.ranks import Ranks
from autotp.cost.machines.calibrate import Clock
from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import table, write_section

TPS = (1, 2, 4)
SHAPES = (
    (128, 1, 64),
    (128, 8, 128),
    (256, 2, 64),
    (256, 8, 128),
    (512, 1, 64),
    (512, 4, 128),
    (1024, 1, 64),
    (1024, 2, 256),
)
LAYERS, HEAD = 2, 32
BUDGET = 0.5  # seconds that one shape is timed for
HEADING = "Predicted against measured step time"


class Shape(NamedTuple):
    """Width of the decoder, sequences, and their length."""

    width: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.width} x {self.batch} x {self.length}"


class Point(NamedTuple):
    """One shape at one degree: seconds of a step, forward and backward, and what it takes of its thread's CPU time."""

    tp: int
    shape: str
    predicted: float
    measured: float
    cpu: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def measure(tp: int, shapes: Sequence[Shape]) -> Record:
    """On one of `tp` ranks: calibrate, then predict and time each shape."""
    clock = Clock(Ranks.find(tp), torch.device("cpu"), BUDGET)
    cluster = autotp.calibrate(name=f"{tp} ranks", dtypes=[torch.float32], show=False)
    return {"points": [step(shape, tp, cluster, clock) for shape in shapes], "cluster": fitted(cluster)}


def step(shape: Shape, tp: int, cluster: autotp.Cluster, clock: Clock) -> Point:
    """Predicted and measured seconds of forward and backward of one shape."""
    torch.manual_seed(0)
    x = torch.randn(shape.batch, shape.length, shape.width)
    model = nn.Sequential(*(Layer(shape.width) for _ in range(LAYERS)))
    sharded = autotp.compile(model, tp, example_inputs=x, cluster=cluster, check_capture=False)

    def once() -> None:
        sharded.zero_grad(set_to_none=True)
        sharded(x).square().mean().backward()

    return Point(tp, str(shape), sharded.plan.totals.passes, clock.time(once), clock.worst(cpu(once)))


def cpu(call: Callable[[], object], calls: int = 3) -> float:
    """Return the CPU seconds of this thread in one call, whatever else runs on the cores."""
    begun = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begun) / calls


def run(
    tps: Sequence[int] = TPS, shapes: Sequence[Shape] | None = None, quiet: bool = False
) -> tuple[list[Point], Any]:
    """All points, and what was calibrated for each."""
    chosen = [Shape(*s) for s in SHAPES] if shapes is None else shapes
    points: list[Point] = []
    clusters = {}
    for tp in track(tps, "measuring", console=Console(stderr=True), transient=True, disable=quiet):
        found = on_ranks(functools.partial(measure, tp, chosen), tp)[0]
        points += [Point(*p) for p in found["points"]]
        clusters[tp] = found["cluster"]
    return points, clusters


def fitted(cluster: autotp.Cluster) -> dict[str, float]:
    """The numbers of a calibrated cluster that predictions here depend on, in three digits."""
    names = ("memory_bandwidth", "launch_overhead", "intra_latency", "intra_bandwidth")
    numbers = {"float32_flops": cluster.peak("float32"), **{n: getattr(cluster, n) for n in names}}
    return {n: float(f"{x:.3g}") for n, x in numbers.items()}


def summary(points: Sequence[Point]) -> dict[str, float]:
    """Spearman's rank correlation of predictions and times, the relative errors, and the middle ratio."""
    off = [abs(p.ratio - 1) for p in points]
    return {
        "rank_correlation": round(rank_correlation([p.predicted for p in points], [p.measured for p in points]), 3),
        "mean_error": round(statistics.mean(off), 3),
        "worst_error": round(max(off), 3),
        "predicted_over_measured": round(statistics.median(p.ratio for p in points), 3),
    }


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's: the correlation of the places that values have in their own order; equal ones share a place."""

    def places(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + sum(v == x for v in values) / 2 for x in values]

    return statistics.correlation(places(xs), places(ys))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and a JSON line; with --write also the section of docs/performance.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_accuracy", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    before, began = os.getloadavg()[0], time.monotonic()
    points, clusters = run()
    record = {
        "benchmark": "cost_accuracy", **made("benchmarks.cost_accuracy", arguments), "cores": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.monotonic() - began), **summary(points),
        "by_tp": {tp: summary([p for p in points if p.tp == tp]) for tp in TPS},
        "tp_1_cpu": summary([p._replace(measured=p.cpu) for p in points if p.tp == 1]),
        "points": [p._asdict() for p in points], "clusters": clusters,
    }  # fmt: skip
    Console().print(printed(points))
    if given.write:
        write_section(HEADING, page(record, points))
    print(json.dumps(record))


def printed(points: Sequence[Point]) -> Table:
    """The points as a table for the terminal."""
    shown = Table("tp", "width x batch x length", "predicted ms", "measured ms", "ratio", "CPU ms", title=HEADING)
    for p in points:
        times = (f"{1e3 * x:.2f}" for x in (p.predicted, p.measured))
        shown.add_row(str(p.tp), p.shape, *times, f"{p.ratio:.2f}", f"{1e3 * p.cpu:.2f}")
    return shown


def page(record: dict[str, Any], points: Sequence[Point]) -> str:
    """The section of docs/performance.md."""
    rows = {s: [p for p in points if p.shape == s] for s in dict.fromkeys(p.shape for p in points)}
    columns = [(tp, x) for tp in dict.fromkeys(p.tp for p in points) for x in ("predicted", "measured", "cpu")]
    columns = [(tp, x) for tp, x in columns if x != "cpu" or tp == 1]
    head = ["width x batch x length", *(f"tp={tp} {'CPU time' if x == 'cpu' else x}" for tp, x in columns)]
    cells = [
        [s, *(f"{1e3 * getattr(p, x):.1f}" for p in ps for tp, x in columns if p.tp == tp)] for s, ps in rows.items()
    ]
    results = [(f"tp={tp}", found) for tp, found in record["by_tp"].items()] + [("all", record)]
    results.append(("tp=1, of CPU time", record["tp_1_cpu"]))
    found = [
        [n, f"{r['rank_correlation']:.2f}", f"{r['mean_error']:.0%}", f"{r['worst_error']:.0%}",
         f"{r['predicted_over_measured']:.2f}"] for n, r in results
    ]  # fmt: skip
    return f"""\
`{record["command"]}`: forward and backward of a decoder of {LAYERS} layers with heads of {HEAD}, float32, in
milliseconds, by the plan's cost model on a cluster that `autotp.calibrate` measured on the same ranks just before, and
as measured (median of batches, slowest rank). Gloo processes of one thread each on {record["cores"]} cores of
{record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {record["date"]}; load average
{record["load"][0]} before the run and {record["load"][1]} after it, of which its own ranks are one to four.

{table(head, cells)}
Spearman's rank correlation of predicted and measured times, the relative error of the prediction, and the median of
predicted over measured:

{table(["", "rank correlation", "mean error", "worst error", "predicted / measured"], found)}
Every operator counts as a kernel at the calibrated rates, and what starts it is the mean over a chain of small
operators (`Cluster.launch_overhead`, for a matrix product `product_launches` of it). Not counted: the loss, copies
that a reshape makes, and the program's own Python. At tp=1 nothing is waited for: there the CPU time of a step is what
it takes on cores that nothing else uses, and what its measured time has beyond that is other work on these cores."""


if __name__ == "__main__":
    main()
