"""A plan chosen with overlap in its price beside one without, on a slow link: `python -m benchmarks.overlap_plans`.

Both run with overlap, on the simulated link of `benchmarks.overlap`; only the price that the solver saw differs: of
communication and the products beside it the longer one (`Cluster.overlaps`), or the sum.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import autotp
from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import untouched
from benchmarks.helpers.llama.variants import training_step
from benchmarks.helpers.performance import table

from .overlap import BATCH, CLOSE, LENGTH, RANKS, SHAPE, Link, cluster

CASES = {"sum": False, "longer one": True}  # what is priced -> `Cluster.overlaps`
ROUNDS = 7


def measure(rounds: int, batch: int, length: int, link: Link) -> Record:
    """This rank's figures of both plans: predicted and measured seconds, collectives, and the loss."""
    torch.manual_seed(0)
    model = untouched(SHAPE)
    ids, targets = torch.randint(SHAPE.vocabulary, (2, batch, length), generator=torch.Generator().manual_seed(1))
    found: Record = {}
    steps: dict[str, Any] = {}
    for name, overlaps in CASES.items():
        machines = replace(
            cluster(), overlaps=overlaps, intra_latency=link.latency, intra_bandwidth=link.bandwidth
        )  # fmt: skip
        sharded: Any = autotp.compile(
            model, RANKS, example_inputs=ids, cluster=machines, optimise={"overlap": True}, check_capture=False
        )
        sent = Counter(c.name for c in sharded.plan.collectives)
        steps[name] = training_step(sharded, ids, targets)
        found[name] = {"predicted": sharded.plan.totals.passes, "sent": dict(sent), "loss": float(steps[name]())}
    with link.between():
        times = interleaved(steps, rounds, before=dist.barrier)
    return {name: found[name] | {"wall": times[name].wall} for name in CASES}


def run(rounds: int = ROUNDS, batch: int = BATCH, length: int = LENGTH, link: Link | None = None) -> Record:
    """A row for each plan: medians over the rounds of the slower rank's seconds.

    Args:
        rounds: interleaved steps of each. batch, length: of the tokens. link: between the ranks.
    """
    everyone = on_ranks(functools.partial(measure, rounds, batch, length, link or Link()), RANKS)
    rows = {}
    for name in CASES:
        walls = zip(*(rank[name]["wall"] for rank in everyone), strict=True)
        rows[name] = {**everyone[0][name], "wall": round(statistics.median(map(max, walls)), 4)}
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_plans", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"sequences (default {BATCH})")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of each (default {LENGTH})")
    given = parser.parse_args(arguments)
    load = round(os.getloadavg()[0], 1)
    rows = run(given.rounds, given.batch, given.length)
    losses = [row["loss"] for row in rows.values()]
    if abs(losses[0] - losses[1]) > CLOSE * abs(losses[0]):
        raise RuntimeError(f"the plans compute different losses: {losses}")
    cells = [[name, f"{r['predicted']:.3f}", f"{r['wall']:.3f}", str(r["sent"])] for name, r in rows.items()]
    print(table(["priced", "predicted, s", "step, s", "conversions"], cells))
    faster = rows["longer one"]["wall"] / rows["sum"]["wall"]
    about = made("benchmarks.overlap_plans", arguments)
    print(json.dumps({"benchmark": "overlap_plans", **about, "load_before": load, "ratio": round(faster, 3), **rows}))


if __name__ == "__main__":
    main()
