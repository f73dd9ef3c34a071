"""Experts over two ranks, four ways: `python -m benchmarks.lists.experts [--write]`.

Two gloo processes of one thread each run forward and backward of one mixture with as many tokens in all. Bytes are what
a rank sends in a step by the plan.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autotp
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.performance import command, table
from tests.helpers.modules.mixtures import Mixture

HEADING = "Experts over two ranks"
EXPERTS, WIDTH, RANKS, LENGTH, STEPS = 8, 256, 2, 64, 5
BATCHES = (4, 16, 64)
BY_EXPERT = {"up": Shard(0), "down": Shard(0)}
WITHIN = {"up": Shard(2), "down": Shard(1)}
WAYS: dict[str, dict[str, Any]] = {
    "tp=2, by expert, whole batch": {"tp": 2, "pins": BY_EXPERT},
    "tp=2, within the expert": {"tp": 2, "pins": WITHIN},
    "dp=2, experts whole": {"dp": 2},
    "dp=2, ep=2, rows travel": {"dp": 2, "ep": 2},
}


def steps(batch: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of a step on this rank, bytes that it sends, and seconds by the plan, by each way in turn."""
    torch.manual_seed(0)
    ids, mine, measured = torch.randint(32, (batch, LENGTH)), dist.get_rank(), {}
    modules: dict[str, tuple[Any, torch.Tensor]] = {}
    for name, how in WAYS.items():
        degrees = (how.get("dp", 1), how.get("tp", 1))
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("dp", "tp"))
        own = ids.chunk(RANKS)[mine] if "dp" in how else ids
        options: Any = {k: v for k, v in how.items() if k != "tp"}
        torch.manual_seed(0)
        model = Mixture(EXPERTS, WIDTH)
        options |= {"mesh": mesh, "example_inputs": own, "cluster": "local"}
        modules[name] = autotp.compile(model, how.get("tp", 1), **options), own
        plan = modules[name][0].plan
        totals, axis = plan.totals, plan.batch
        sent = totals.forward_bytes + totals.backward_bytes + axis.sent + axis.values
        measured[name] = [[], sent, totals.passes]
    for _ in range(rounds):
        for name, (module, own) in modules.items():
            module(own).square().mean().backward()
            start = time.process_time()
            for _ in range(STEPS):
                module(own).square().mean().backward()
            measured[name][0].append((time.process_time() - start) / STEPS)
    return {name: [statistics.median(seconds), *others] for name, (seconds, *others) in measured.items()}


def run(rounds: int) -> list[dict[str, Any]]:
    """Measure every way with every number of tokens; seconds are those of the slower rank."""
    rows = []
    for batch in BATCHES:
        ranks = on_ranks(functools.partial(steps, batch, rounds), RANKS)
        for name in WAYS:
            seconds = max(each[name][0] for each in ranks)
            rows.append({"tokens": batch * LENGTH, "way": name, "cpu_seconds": seconds})
            rows[-1] |= {"bytes": ranks[0][name][1], "predicted": ranks[0][name][2]}
    return rows


def page(record: Mapping[str, Any]) -> str:
    """Section of these rows."""
    ways = {name: [row for row in record["rows"] if row["way"] == name] for name in WAYS}
    numbers = [batch * LENGTH for batch in BATCHES]
    head = ["", *(f"{tokens:,} tokens: ms, predicted, MB" for tokens in numbers)]
    cells = []
    for name, rows in ways.items():
        texts = []
        for row in rows:
            texts.append(f"{1e3 * row['cpu_seconds']:.1f}, {1e3 * row['predicted']:.1f}, {row['bytes'] / 1e6:.2f}")
        cells.append([name, *texts])
    return (
        f"A mixture of {EXPERTS} experts, {WIDTH} wide, two for each token, forward and backward on {RANKS} gloo "
        "ranks of\none thread: CPU milliseconds of the slower rank, and what a rank sends by the plan, gradients over "
        "dp included.\n"
        f"Median of {record['rounds']} rounds. With ep a rank has its own experts alone, whose gradients nothing\n"
        "sums over dp. *Predicted*: by the plan for the preset `local`, another machine's measured figures; what "
        "waits\nfor the other rank is in it, and not in CPU time. The fastest way is\n"
        + ";\n".join(_fastest(record, tokens) for tokens in numbers)
        + ".\n\n"
        + table(head, cells)
    )


def _fastest(record: Mapping[str, Any], tokens: int) -> str:
    """The way that takes least, as measured and as predicted, in words."""
    rows = [row for row in record["rows"] if row["tokens"] == tokens]
    measured, predicted = (min(rows, key=lambda row: row[by])["way"] for by in ("cpu_seconds", "predicted"))
    return f"at {tokens:,} tokens *{measured}* by CPU time, *{predicted}* by the plans"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    command("lists.experts", HEADING, run, page, 3, __doc__, arguments)


if __name__ == "__main__":
    main()
