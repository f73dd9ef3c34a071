"""CPU seconds of one decoded token on local gloo ranks: `python -m benchmarks.decode [--write]`.

Two processes of one thread each hold the same Llama (`helpers.llama.megatron`), made tensor-parallel by hand,
by transformers' `tp_plan` and by autotp, and call it for the token after a prompt, with a cache that holds the prompt:
the module's call alone, without what `generate` does around it. All must give the same logits; then each takes a step
in turn. Where a step runs eagerly, the bytes of the storages that its operators read and that were there before it
are counted: the weights and the cache, once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import everywhere, on_ranks
from benchmarks.helpers.interleaved import Times, interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama import soak
from benchmarks.helpers.llama.decode_legs import Step, legs
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.storages import Storages, as_planned
from benchmarks.helpers.performance import table, write_section
from benchmarks.helpers.together import together

HEADING = "A decoded token beside a hand-written module"
SHAPE, PROMPT, RANKS, ROUNDS = Shape(), 128, 2, 15
CLOSE = 2e-4  # of the largest logit: float32 sums in another order


@torch.no_grad()
def compared(shape: Shape, prompt: int, rounds: int, only: Sequence[str] = ()) -> Record:
    """This rank's times of every leg, its first call's, how far its logits are off, and the bytes that it reads."""
    model = untouched(shape).eval()
    ids = torch.randint(shape.vocabulary, (1, prompt + 1), generator=torch.Generator().manual_seed(1))
    steps: dict[str, Any] = {}
    found: Record = {"first": {}, "off": {}, "read": {}, "planned": {}, "refused": {}}
    wanted = model(ids)[:, -1:]
    known = legs()
    chosen = {*only, *(known[name][0] for name in only)} if only else set(known)
    for name, (_, make) in known.items():
        if name not in chosen:
            continue
        began = time.perf_counter()
        step, logits, why = begun(lambda: make(model, shape, ids))  # noqa: B023  called at once
        if why:
            found["refused"][name] = why
            continue
        found["first"][name] = time.perf_counter() - began
        found["off"][name] = max(difference(x, wanted) for x in (logits, step())) if logits.numel() else 0.0
        found["read"][name] = None if "compiled" in name else bytes_read(step)
        found["planned"][name] = getattr(step, "planned", None)
        steps[name] = step
    found["times"] = {k: t._asdict() for k, t in interleaved(steps, rounds, before=dist.barrier).items()}
    return found


def begun(make: Callable[[], Step]) -> tuple[Step, Tensor, str]:
    """A leg's step, its first logits, and why there are none."""
    found, why = everywhere(lambda: (step := make(), step()))
    step, logits = found or (Tensor, torch.empty(0))
    return step, logits, why


def difference(logits: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a part of the largest logit."""
    return float((logits - wanted).abs().max() / wanted.abs().max())


def bytes_read(step: Step) -> tuple[int, int]:
    """How many storages, and their bytes, reach operators in a step and were there before it."""
    with Storages() as storages:
        step()
    return len(storages.read), storages.nbytes


def run(shape: Shape = SHAPE, prompt: int = PROMPT, rounds: int = ROUNDS, only: Sequence[str] = ()) -> Record:
    """What all ranks found, put together: a row for every leg."""
    everyone = on_ranks(functools.partial(compared, shape, prompt, rounds, only), RANKS)
    return {"rows": rows(everyone), "refused": everyone[0]["refused"]}


def rows(everyone: Sequence[Record]) -> dict[str, Record]:
    """By leg: CPU seconds of all ranks together, seconds of the slowest, and what each is of the hand-written one's."""
    times = {name: [Times(**found["times"][name]) for found in everyone] for name in everyone[0]["times"]}
    bases = {name: base for name, (base, _) in legs().items()}
    out: dict[str, Record] = {}
    for name, mine in times.items():
        read = everyone[0]["read"][name]
        out[name] = together(mine, times[bases[name]]) | {
            "first_s": round(max(found["first"][name] for found in everyone), 1),
            "off": float(f"{max(found['off'][name] for found in everyone):.1e}"),
            "storages": read and read[0],
            "bytes": read and read[1],
            "planned": everyone[0].get("planned", {}).get(name),
        }
    return out


def check(found: Record) -> None:
    """Refuse figures of what does not compute the same.

    Raises:
        RuntimeError: logits differ, or a step reads other bytes than its plan says.
    """
    for name, row in found["rows"].items():
        if row["bytes"] and row["planned"] and not as_planned(row["bytes"], row["planned"]):
            raise RuntimeError(f"{name} reads {row['bytes']} bytes, and its plan says {row['planned']:.0f}")
        if row["off"] > CLOSE:
            raise RuntimeError(f"{name} computes something else: logits are {row['off']} off")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default {ROUNDS})")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, and what they are held against")
    parser.add_argument(
        "--soak", type=int, metavar="TOKENS", help="decode so many tokens, and see what memory grows by"
    )
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.only} - {*legs()}):
        parser.error(f"--only names no leg by {unknown[0]!r}; the legs are: {'; '.join(legs())}")
    if given.soak:
        return soaked(given.soak)
    before = os.getloadavg()[0]
    found = run(rounds=given.rounds, only=given.only)
    record = {"benchmark": "decode", **made("benchmarks.decode", arguments), "cores": os.cpu_count()}
    record |= {"rounds": given.rounds, "load_before": round(before, 1), "shape": asdict(SHAPE), **found}
    print(page(record))
    print(json.dumps(record))
    check(found)
    if given.write:
        write_section(HEADING, page(record))
    return None


def soaked(tokens: int) -> None:
    """Decode so many tokens on the ranks, and refuse growth beyond the cache."""
    for rank, found in enumerate(on_ranks(functools.partial(soak.soak, tokens), RANKS)):
        grown = f"the cache grew by {found['cache'] / 1e6:.2f} MB, the process by {found['process'] / 1e6:.2f} MB"
        print(f"rank {rank}: {tokens} tokens; in the last three quarters {grown}")
        soak.check(found)


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = ["", "CPU, ms a token", "ratio", "wall, ms", "ratio", "first call, s", "storages", "read, MB", "planned"]
    cells = [
        [name, f"{1e3 * r['cpu_s']:.1f}", f"{r['cpu_ratio']:.3f}", f"{1e3 * r['wall_s']:.1f}",
         f"{r['wall_ratio']:.3f}", f"{r['first_s']:.1f}", str(r["storages"] or "-"),
         f"{r['bytes'] / 1e6:.1f}" if r["bytes"] else "-", f"{r['planned'] / 1e6:.1f}" if r["planned"] else "-"]
        for name, r in record["rows"].items()
    ]  # fmt: skip
    refused = "".join(f"\nNot measured: {name}: {why}.\n" for name, why in record["refused"].items())
    s = SHAPE
    return f"""\
`{record["command"]}`: one token after a prompt of {PROMPT}, by a Llama (hidden {s.hidden}, {s.layers} layers,
{s.heads} heads with {s.kv_heads} of keys and values, feed-forward {s.wide}, {s.vocabulary} words), float32, over
{RANKS} gloo processes of one thread each; the module's call with a cache, whose logits are whole on every rank and are
compared before anything is timed. All split by Megatron's plan. CPU seconds of both ranks together, clock of the
slower one: medians of {record["rounds"]} interleaved rounds, and the median of the ratios to the hand-written module,
eager or compiled, in the same round. Putting the cache back as the prompt left it is not counted.
*read*: bytes of the storages that reach operators on rank 0 and were there before
the step; *planned*: weights and cache of a rank by the plan, which the command holds against it.
{record["cores"]} cores of {record["machine"]}; torch {record["torch"]}, transformers {record["transformers"]}, Python
{record["python"]}, {record["date"]}, load average {record["load_before"]} before.

{table(head, cells)}{refused}"""


if __name__ == "__main__":
    main()
