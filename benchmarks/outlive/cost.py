"""What keeping a step costs, beside one copy of the same bytes and beside steps: `python -m benchmarks.outlive.cost`.

The Llama of `benchmarks.step_time` with AdamW and 2,048 tokens, over two gloo processes of one thread each.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from autotp.runtime.checkpoint.saving import collect
from autotp.runtime.checkpoint.shared_memory import Layout
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.llama.megatron import untouched
from benchmarks.helpers.performance import command, table
from benchmarks.step_time import RANKS, SHAPE

HEADING = "Keeping a step in memory"
TOKENS, ROUNDS, STEPS, EVERY = 2048, 9, 4, 10


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, and the result."""
    dist.barrier()
    began = time.thread_time()
    result = do()
    return time.thread_time() - began, result


def measured(tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    """What this rank has found."""
    ids, targets = torch.randint(SHAPE.vocabulary, (2, 1, tokens), generator=torch.Generator().manual_seed(1))
    sharded: Any = autotp.compile(untouched(SHAPE), example_inputs=ids, check_capture=False)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)

    def step() -> None:
        logits = sharded(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    beside: dict[str, list[float]] = {"alone": [], "beside": [], "step": []}
    parts: dict[str, list[float]] = {"prepare": [], "keep": [], "copy": []}
    with sharded.snapshot(optimizer, every=2) as kept:
        step()
        step()
        for number in range(steps):  # beside each second one the step before is copied
            dist.barrier()
            began, cpu = time.perf_counter(), time.thread_time()
            step()
            beside["alone" if number % 2 else "beside"].append(time.perf_counter() - began)
            beside["step"].append(time.thread_time() - cpu)
        kept.wait()
        for _ in range(rounds):
            seconds, copying = timed(kept._copying)
            parts["prepare"].append(seconds)
            parts["keep"].append(timed(copying)[0])
            places, values = pairs(kept)
            parts["copy"].append(timed(functools.partial(torch.ops.aten._foreach_copy_, places, values))[0])
        size = sum(p.to_local().nbytes for p in sharded.parameters()) * 3  # AdamW has two states
    return {"bytes": size, "said": str(kept), **beside, **parts}


def pairs(kept: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The memory of a file as tensors, and those that are copied there."""
    layout = Layout(collect(kept._shards, kept._optimizer, None, kept._names)[0])
    slot = kept._slots[kept._folder / f"{kept._epoch}-{kept._rank}-{kept._number}"]
    rows = zip(layout.starts, layout.sources, strict=True)
    return [slot.data[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in rows], layout.sources


def run(rounds: int) -> dict[str, Any]:
    """The larger value of both ranks, of medians; the ratio is the median of those of the same round."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ |= {"TORCHELASTIC_RUN_ID": "cost", "AUTOTP_MEMORY": memory}
        everyone = on_ranks(functools.partial(measured, TOKENS, rounds, STEPS), RANKS)
    out: dict[str, Any] = {"bytes": max(one["bytes"] for one in everyone), "said": everyone[0]["said"]}
    for name in ("prepare", "keep", "copy", "step", "alone", "beside"):
        out[name] = max(statistics.median(one[name]) for one in everyone)
    ratios = [
        [(p + k) / c for p, k, c in zip(*(one[n] for n in ("prepare", "keep", "copy")), strict=True)]
        for one in everyone
    ]
    out["ratio"] = max(statistics.median(one) for one in ratios)
    out["share"] = (out["prepare"] + out["keep"]) / (EVERY * out["step"])
    return out


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    r = record["rows"]
    said = re.sub(r"copied into [^,]*", "copied into /dev/shm/...", r["said"]).replace("\n", "\n    ")
    head = ["a rank", "", ""]
    cells = [
        ["kept bytes", f"{r['bytes'] / 1e6:,.0f} MB", ""],
        ["CPU of one copy of them", f"{r['copy']:.3f} s", "1"],
        ["CPU of keeping: looking up, copy, digests, record", f"{r['prepare'] + r['keep']:.3f} s", f"{r['ratio']:.2f}"],
        ["of which on the thread that trains", f"{r['prepare']:.3f} s", ""],
        ["CPU of a step", f"{r['step']:.2f} s", ""],
        [f"keeping with every={EVERY}, as a share of steps", f"{100 * r['share']:.2f}%", ""],
        ["a step without a copy beside it", f"{r['alone']:.2f} s", ""],
        ["a step with one", f"{r['beside']:.2f} s", ""],
    ]
    return f"""\
`{record["command"]}`: the Llama of [step time](#step-time-beside-a-hand-written-module) with AdamW, a step of {TOKENS}
tokens, over {RANKS} gloo processes of one thread each. Medians, of the slower rank; the ratio is to a plain copy of the
same tensors into the same memory in the same round. Of {record["rounds"]} rounds and {STEPS} steps. {record["cores"]}
cores of {record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {record["date"]}, load average
{record["load_before"]} before. What is printed beforehand on the first rank:

    {said}

{table(head, cells)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command("outlive.cost", HEADING, run, page, ROUNDS, __doc__, arguments)


if __name__ == "__main__":
    main()
