"""What a call costs beside its arithmetic: `python -m benchmarks.overhead [--write]`.

A Llama so small that starting operators is all there is to it, as rank 0 of torch's "fake" process group, which sends
nothing: CPU time of forward and backward of autotp's module, with its DTensor parameters, beside the hand-written one
of the same plan with plain ones (`benchmarks.helpers.llama.megatron`) and beside torch's `parallelize_module`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers.command import made
from benchmarks.helpers.interleaved import Times, interleaved, ratio
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import dtensor, hand, ours, sent, training_step
from benchmarks.helpers.performance import table, write_section
from benchmarks.lists.hand_plans import FakeStore

HEADING = "Overhead of a call"
SHAPE, LENGTH, TP = Shape(hidden=64, layers=2, heads=8, kv_heads=4, wide=128, vocabulary=256), 16, 2
ROUNDS, REPEAT = 40, 10
HAND, OURS, TORCH = "hand-written", "autotp", "DTensor"
SCHEMES = {"plain": False, "sequence-parallel": True}


def modules(sequence: bool) -> dict[str, nn.Module]:
    """The three modules by one plan, which call the same collectives (DTensor: more)."""
    model, ids = untouched(SHAPE), torch.zeros(1, LENGTH, dtype=torch.long)
    return {
        HAND: hand(model, SHAPE, sequence),
        OURS: ours(model, ids, sequence, SHAPE),
        TORCH: dtensor(model, SHAPE, sequence),
    }


def measure(sequence: bool, rounds: int = ROUNDS, repeat: int = REPEAT) -> dict[str, Times]:
    """Times of a step of each, by rank 0 of `TP` that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    try:
        ids, targets = torch.randint(SHAPE.vocabulary, (2, 1, LENGTH))
        steps = {name: training_step(module, ids, targets) for name, module in modules(sequence).items()}
        for step in steps.values():
            step()
        bytes_sent = {name: sent(steps[name], TP)[1] for name in (HAND, OURS)}
        if bytes_sent[HAND] != bytes_sent[OURS]:
            raise RuntimeError(f"these are different plans: they send {bytes_sent} bytes in a step")
        return interleaved(steps, rounds, repeat)
    finally:
        dist.destroy_process_group()


def summary(found: Mapping[str, Times]) -> Record:
    """Milliseconds of CPU time of a step, and its ratio to the hand-written one's."""
    return {
        name: {
            "cpu_ms": round(1e3 * statistics.median(times.cpu), 3),
            "ratio": round(ratio(times.cpu, found[HAND].cpu), 3),
        }
        for name, times in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    results = {scheme: summary(measure(sequence, given.rounds)) for scheme, sequence in SCHEMES.items()}
    record = {"benchmark": "overhead", **made("benchmarks.overhead", arguments), "cores": os.cpu_count()}
    record |= {"rounds": given.rounds, "load_before": round(before, 1), "results": results}
    if given.write:
        write_section(HEADING, page(record))
    print(page(record))
    print(json.dumps(record))


def page(record: Record) -> str:
    """The section of docs/performance.md."""
    rows = [
        [
            name,
            *(
                cell
                for r in record["results"].values()
                for cell in (f"{r[name]['cpu_ms']:.2f}", f"{r[name]['ratio']:.2f}")
            ),
        ]
        for name in (HAND, OURS, TORCH)
    ]
    head = ["", *(text for scheme in record["results"] for text in (f"{scheme}, ms", "ratio"))]
    s = SHAPE
    return f"""\
`{record["command"]}`: CPU time of forward and backward of a Llama of hidden size {s.hidden}, {s.layers} layers
and {LENGTH} tokens, as rank 0 of {TP} in torch's "fake" process group, which sends nothing: what is left is the cost of
starting operators. The hand-written module has plain parameters, the others have DTensors. Medians of
{record["rounds"]} interleaved rounds of {REPEAT} steps, and the median of the ratios to the hand-written one of the
same round. One thread, {record["cores"]} cores of {record["machine"]}; torch {record["torch"]},
Python {record["python"]}, {record["date"]}, load average {record["load_before"]} before the run.

{table(head, rows)}"""


if __name__ == "__main__":
    main()
