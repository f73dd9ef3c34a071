"""Ranks of unlike speed on this CPU, with shares by what `calibrate` finds: `python -m benchmarks.lists.unequal`.

python -m benchmarks.lists.unequal                 # each ratio of `RATIOS`; a page and results/unequal.json
python -m benchmarks.lists.unequal --only 2:1      # a part; its results replace those in the file
python -m benchmarks.lists.unequal --missing       # those that have no result yet

A process of one thread for each rank, made slower by a duty cycle in it (`helpers.duty`), whose sum is at most 1.6
cores. Each rank measures itself with `autotp.calibrate`, and a plan for the cluster that they found is held against
the even one, in interleaved steps: a training step of the Llama of benchmarks.step_time, and a decoded token. A duty
cycle is no speed: a thread that slept finds its caches cold, and its CPU seconds do less. So a rank's rate is the part
of the step that it has in the even split over the seconds in which it does that, and the least time that any shares can
have is one over the sum of all rates, and the collectives, which no share divides.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autotp
from autotp.comm.collectives import real
from benchmarks.helpers import duty
from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.decode_legs import Cached
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import training_step
from benchmarks.helpers.performance import table, write_section
from benchmarks.step_time import transformed

from .hand_plans import Counted

RESULTS = Path(__file__).parents[1] / "results" / "unequal.json"
HEADING = "Unequal devices"
RATIOS = (2, 1), (3, 2, 1), (4, 4, 1, 1)
SHAPE, LENGTH, PROMPT, ROUNDS, TOKENS = Shape(), 256, 128, 7, 15
WITHIN = {"training": 1.10, "token": 1.15}  # of the least time
GAIN = 1.3  # times as fast as the even split at 2:1


def measured(ratio: Sequence[int], shape: Shape, rounds: int, tokens: int) -> Record:
    """Measure on this rank both plans of both uses, beside its speed and the collectives alone.

    Args:
        ratio: of the ranks' speeds. shape: of the Llama. rounds: steps of each plan. tokens: decoded by each.
    """
    rank, tp, cycles = dist.get_rank(), dist.get_world_size(), duty.cycles(ratio)
    assert sum(cycles) <= duty.CORES + 1e-9
    duty.slow_down(cycles[rank])
    cluster = autotp.calibrate(base="local", dtypes=[torch.float32], show=False)
    share, products = speed(shape)
    found: Record = {"cycle": cycles[rank], "ratio": cluster.ratio(), "speed": share, "products": products, "uses": {}}
    for use, steps_of, count in (("training", training, rounds), ("token", decoding, tokens)):
        steps, shares, plan = {}, {}, None
        for name, cluster_of in (("even", "local"), ("uneven", cluster)):
            steps[name], plan = steps_of(shape, tp, cluster_of)
            shares[name] = [plan.shares, parts(plan)]
        with torch.set_grad_enabled(use == "training"):
            times = timed(steps, count)
            calls = collectives(steps["even"], tp)
        times |= timed({"collectives": calls}, count)
        choice = plan.share_choice if plan is not None else None
        predicted = [choice.even, choice.seconds] if choice is not None else []
        found["uses"][use] = {"shares": shares, "times": times, "predicted_s": predicted}
    return found


def chosen(model: Any, tp: int, cluster: Any, inputs: Any, **keywords: Any) -> autotp.Plan:
    """The plan for this cluster: with the shares that it finds, or, where it finds none, by the cluster's ratio."""
    keywords |= {"example_inputs": inputs, "sequence_parallel": False, "check_capture": False, "cluster": cluster}
    plan = autotp.plan(model, tp, **keywords)
    unlike = isinstance(cluster, autotp.Cluster) and len(cluster.ratio()) > 1
    if not unlike or plan.shares or getattr(plan, "share_choice", None) is not None:
        return plan
    return autotp.plan(model, tp, shares=cluster.ratio(), **keywords)


def parts(plan: autotp.Plan) -> list[float]:
    """Part of the weights that each rank has."""
    own = [
        sum(torch.Size(p.layout.local_shape(p.shape, plan.tp, r)).numel() for p in plan.parameters)
        for r in range(plan.tp)
    ]
    return [round(x / plan.totals.parameters, 3) for x in own]


def training(shape: Shape, tp: int, cluster: Any) -> tuple[Callable[[], Any], autotp.Plan]:
    """A training step of the Llama under the plan for a cluster."""
    model = untouched(shape)
    ids, targets = torch.randint(shape.vocabulary, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = chosen(model, tp, cluster, ids)
    return training_step(autotp.parallelize(model, plan, example_inputs=ids), ids, targets), plan


def decoding(shape: Shape, tp: int, cluster: Any) -> tuple[Callable[[], Any], autotp.Plan]:
    """A decoded token of it, with transformers' cache."""
    model: Any = transformed(untouched(shape), shape).eval()
    ids = torch.randint(shape.vocabulary, (1, PROMPT + 1), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids[:, :-1]}
    plan = chosen(model, tp, cluster, inputs, objective="decode")
    module = autotp.parallelize(model, plan, example_inputs=inputs)
    with torch.no_grad():
        return Cached(module, model.config, ids, static=False), plan


def speed(shape: Shape) -> tuple[float, float]:
    """CPU seconds of this rank's thread in a second of products, and how many products; all ranks at once."""
    x, w, count = torch.rand(LENGTH, shape.hidden), torch.rand(shape.hidden, shape.hidden), 0
    dist.barrier()
    began, spent = time.perf_counter(), time.thread_time()
    while time.perf_counter() < began + 1.0:
        torch.mm(x, w)
        count += 1
    seconds = time.perf_counter() - began
    return (time.thread_time() - spent) / seconds, count / seconds


def collectives(step: Callable[[], Any], tp: int) -> Callable[[], None]:
    """A call of all collectives of a step, one after the other."""
    with Counted(tp) as counted:
        step()
    dist.barrier()
    messages = []
    for text, count in counted.calls.items():
        primitive, _, shape = text.partition(" ")
        messages.append((primitive, torch.zeros([int(n) for n in shape.split("x")]), count))
    group: Any = dist.group.WORLD

    def call() -> None:
        for primitive, message, count in messages:
            for _ in range(count):
                real(primitive, message, "sum", tp=tp, group=group.group_name)  # type: ignore[arg-type]

    return call


def timed(steps: dict[str, Any], rounds: int) -> Record:
    """Medians of interleaved steps: seconds by the clock, and CPU seconds of this thread."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            getattr(step, "ready", lambda: None)()
            dist.barrier()
            began, spent = time.perf_counter(), time.thread_time()
            step()
            if round_:
                times[name].append((time.perf_counter() - began, time.thread_time() - spent))
    return {name: [statistics.median(x) for x in zip(*each, strict=True)] for name, each in times.items()}


def together(ratio: Sequence[int], everyone: Sequence[Record]) -> Record:
    """The figures of a ratio, of what each rank found."""
    speeds = [found["speed"] for found in everyone]
    row: Record = {
        "cycles": [found["cycle"] for found in everyone],
        "speeds": speeds,
        "products": [found["products"] for found in everyone],
        "calibrated": everyone[0]["ratio"],
        "uses": {},
    }
    for use in WITHIN:
        each = [found["uses"][use]["times"] for found in everyone]
        wall = {name: max(times[name][0] for times in each) for name in each[0]}
        own = [times["even"][1] - times["collectives"][1] for times in each]  # CPU seconds
        dealt = everyone[0]["uses"][use]["shares"]["even"][1]
        rates = [part * share / cpu for part, share, cpu in zip(dealt, speeds, own, strict=True)]
        least = 1 / sum(rates) + wall["collectives"]
        row["uses"][use] = {
            "even_s": wall["even"],
            "uneven_s": wall["uneven"],
            "collectives_s": wall["collectives"],
            "least_s": least,
            "cpu_s": own,
            "rates": rates,
            "predicted_s": everyone[0]["uses"][use]["predicted_s"],
            "over_least": wall["uneven"] / least,
            "gain": wall["even"] / wall["uneven"],
            "shares": everyone[0]["uses"][use]["shares"],
        }
    return row


def beside(rates: Sequence[float]) -> str:
    """Rates over the least of them."""
    return ":".join(f"{rate / min(rates):.2g}" for rate in rates) or "-"


def agreement(gains: Sequence[tuple[str, float, float]]) -> str:
    """How many pairs of one use have the order of their measured gains in the predicted ones too, of how many.

    Args:
        gains: uses, gains over the even split as measured, and as predicted; NaN where they were not.
    """
    pairs = [(a, b) for a, b in itertools.combinations(gains, 2) if a[0] == b[0] and not math.isnan(a[2] + b[2])]
    return f"{sum((a[1] - b[1]) * (a[2] - b[2]) > 0 for a, b in pairs)} of {len(pairs)}"


def page(results: Record) -> str:
    """The section of docs/performance.md."""
    head = [
        "cycles",
        "products",
        "calibrated",
        "",
        "rates",
        "weights by rank",
        "even, s",
        "uneven, s",
        "least, s",
        "over least",
        "asked",
        "gain",
        "predicted",
    ]
    cells, order = [], []
    for name, row in results["ratios"].items():
        for use, x in row["uses"].items():
            dealt = " ".join(f"{part:.2f}" for part in x["shares"]["uneven"][1])
            times = [f"{x[key]:.3f}" for key in ("even_s", "uneven_s", "least_s")]
            predicted = x["predicted_s"][0] / x["predicted_s"][1] if x.get("predicted_s") else math.nan
            order.append((use, x["gain"], predicted))
            over = f"{x['over_least']:.2f}", f"{WITHIN[use]:.2f}", f"{x['gain']:.2f}", f"{predicted:.2f}"
            ratios = beside(row.get("products", [])), ":".join(map(str, row["calibrated"]))
            cells.append([name, *ratios, use, beside(x.get("rates", [])), dealt, *times, *over])
    s = SHAPE
    return f"""\
`{results["made"]["command"]}`: gloo processes of one thread, slower by a duty cycle in each,
which come to at most {duty.CORES} of {results["cores"]} cores. Each measures itself with `autotp.calibrate`, and the
plan is for what they found. A training step of a Llama (hidden {s.hidden}, {s.layers} layers, {s.heads} heads with
{s.kv_heads} of keys and values, feed-forward {s.wide}, {s.vocabulary} words, {LENGTH} tokens), and a token of it after
{PROMPT}: medians of interleaved steps by the clock, of the slowest rank. *Products*: what ranks multiply in the same
time, all at once; *rates*: what they do of the step, by the CPU seconds of the even split and how many of these a
second has. *Least*: one over the sum of the rates, and the collectives alone: what no shares go below. *Gain*: over the
even split, at 2:1 at least {GAIN} is asked; *predicted*: by the plan, {agreement(order)} of the pairs of a use in the
order of what was measured. Load average {results["load_before"]} before.

{table(head, cells)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {":".join(map(str, ratio)): ratio for ratio in RATIOS}
    parser.add_argument("--only", nargs="+", default=[*names], choices=[*names], metavar="RATIO", help="these ratios")
    parser.add_argument("--missing", action="store_true", help="only ratios that have no result")
    parser.add_argument("--small", action="store_true", help="a small model and few steps, whose result is not kept")
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    results: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() and not given.small else {"ratios": {}}
    results |= {"load_before": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    results["made"] = made("benchmarks.lists.unequal", arguments)
    for name in given.only:
        if given.missing and name in results["ratios"]:
            continue
        sizes = (Shape(256, 2, 8, 4, 768, 2000), 2, 2) if given.small else (SHAPE, ROUNDS, TOKENS)
        everyone = on_ranks(functools.partial(measured, names[name], *sizes), len(names[name]))
        results["ratios"][name] = together(names[name], everyone)
        if not given.small:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({name: results["ratios"][name]}), flush=True)
    print(page(results))
    if given.write:
        write_section(HEADING, page(results))


if __name__ == "__main__":
    main()
