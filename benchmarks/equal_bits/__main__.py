"""Losses at tp=1, 2 and 4 beside each other, ordinary and with equal bits: `python -m benchmarks.equal_bits [--write]`.

Gloo processes of one thread each train the same Llama by AdamW, as ordinary tensor parallelism and with `tp_invariant`,
at every number of ranks; then steps of benchmarks.step_time's Llama are timed in turns, with and without. The curves
are drawn in docs/assets/equal-bits.svg.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.helpers.command import made
from benchmarks.helpers.curves import Panel, drawing
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import Times
from benchmarks.helpers.performance import ROOT, table, write_section
from benchmarks.helpers.together import together

from .runs import BATCH, SMALL, VIRTUAL, WAYS, WORDS, timed, trained

HEADING, PICTURE = "Equal bits", ROOT / "docs" / "assets" / "equal-bits.svg"
STEPS, ROUNDS, DEGREES = 100, 7, (1, 2, 4)


def run(steps: int, rounds: int) -> dict[str, Any]:
    """By way the losses at each number of ranks, and by number of ranks what equal bits cost."""
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in WAYS}
    costs: dict[int, dict[str, float]] = {}
    for tp in DEGREES:
        everyone = on_ranks(functools.partial(trained, steps), tp)
        for name in WAYS:
            losses[name][tp] = everyone[0][name]
        if rounds:
            times = on_ranks(functools.partial(timed, rounds), tp)
            mine, base = ([Times(*found[name]) for found in times] for name in reversed(WAYS))
            costs[tp] = together(mine, base)
    return {"losses": losses, "costs": costs}


def off(curves: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """By number of ranks, by how much each loss is off that of one rank, as a part of it."""
    return {tp: [(x - one) / one for x, one in zip(losses, curves[1], strict=True)] for tp, losses in curves.items()}


def picture(screens: Mapping[str, Mapping[int, Sequence[float]]], about: str) -> str:
    """Draw both sets of losses, by their titles, on one scale."""
    curves = {title: {f"tp={tp}": values for tp, values in off(losses).items()} for title, losses in screens.items()}
    largest = max(abs(x) for runs in curves.values() for xs in runs.values() for x in xs) or 1e-7
    marks = {y: f"{y:+.0e}" for y in (largest, 0.0, -largest)}
    panels = [Panel(title, runs, marks) for title, runs in curves.items()]
    return drawing("Losses at tp=1, 2 and 4, less that at tp=1, as a part of it", about, panels)


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    rows = []
    for name, curves in record["losses"].items():
        for tp, values in off(curves).items():
            if tp > 1:
                first = next((str(i + 1) for i, x in enumerate(values) if x), "none")
                rows.append([f"{name}, tp={tp}", first, f"{max(map(abs, values)):.1e}"])
    head = ["run", "first step whose loss differs from tp=1", "largest difference, as a part of it"]
    costs = [[f"tp={tp}", f"{c['cpu_s']:.2f}", f"{c['cpu_ratio']:.2f}"] for tp, c in record["costs"].items()]
    s = SMALL
    return f"""\
`{record["command"]}`: {record["steps"]} steps of AdamW on a Llama (hidden {s.hidden}, {s.layers} layers, {s.heads}
heads with {s.kv_heads} of keys and values, {s.vocabulary} words, {BATCH} x {WORDS} tokens), float32, over 1, 2 and 4
gloo processes of one thread each; ordinary, and with the [bits of {VIRTUAL} ranks](invariance.md).

{table(head, rows)}
![Two panels of curves](assets/equal-bits.svg)

What it costs: CPU seconds of all ranks together for a step of the Llama of
[step time](#step-time-beside-a-hand-written-module) with `tp_invariant={VIRTUAL}`, and the median of the ratios to the
ordinary module in the same round, of {record["rounds"]} interleaved rounds. {record["cores"]} cores of
{record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {record["date"]}, load average
{record["load_before"]} before.

{table(["", "CPU, s", "ratio"], costs)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_bits", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the section of docs/performance.md, and the picture"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training (default {STEPS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of timing (default {ROUNDS})")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    record = {"benchmark": "equal_bits", **made("benchmarks.equal_bits", arguments), "cores": os.cpu_count()}
    record |= {"steps": given.steps, "rounds": given.rounds, "load_before": round(before, 1)}
    record |= run(given.steps, given.rounds)
    print(page(record))
    print(json.dumps(record))
    if given.write:
        about = f"{given.steps} steps of AdamW on a small Llama, float32"
        PICTURE.write_text(picture(record["losses"], about), encoding="utf-8")
        write_section(HEADING, page(record))


if __name__ == "__main__":
    main()
