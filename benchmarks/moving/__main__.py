"""Bytes that a move sends from one layout to another, beside those of gathering every tensor and cutting it again.

    python -m benchmarks.moving           # prints the table and a JSON line
    python -m benchmarks.moving --write   # and the section of docs/performance.md

Plans of a Llama of 8B parameters in bfloat16, on the meta device: no process is started and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import autotp
from autotp.inputs import for_model
from autotp.plans.plan import Plan
from autotp.text import amount
from benchmarks.helpers.command import versions
from benchmarks.helpers.performance import command, table
from benchmarks.plan_time import build

MODEL = "Llama-8B"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=8": {"tp": 8}, "dp=2 x tp=4": {"tp": 4, "dp": 2}, "dp=4 x tp=2": {"tp": 2, "dp": 4},
    "dp=8, fully sharded": {"tp": 1, "dp": 8, "fully_shard": True}, "tp=4": {"tp": 4},
}  # fmt: skip
MOVES = (  # from, to, and the number of the target's first rank among the source's
    ("tp=8", "dp=2 x tp=4", 0), ("dp=2 x tp=4", "tp=8", 0), ("dp=4 x tp=2", "tp=8", 0),
    ("dp=8, fully sharded", "tp=8", 0), ("dp=8, fully sharded", "tp=4", 8), ("tp=8", "tp=4", 8), ("tp=4", "tp=4", 4),
)  # fmt: skip


def measured(_: int) -> list[dict[str, Any]]:
    """The bytes of each move."""
    model = build(MODEL)
    inputs: Any = for_model(model)
    plans: dict[str, Plan] = {}
    for name, degrees in LAYOUTS.items():
        plans[name] = autotp.plan(model, example_inputs=inputs, check_capture=False, **degrees)
    rows = []
    for before, after, first in MOVES:
        way = plans[before].transfer(plans[after], first=first)
        rows.append({
            "before": before, "after": after, "apart": bool(first), "bytes": way.bytes, "gathered": way.gathered,
            "busiest": max(way.outgoing.values()), "rounds": len(way.rounds),
        })  # fmt: skip
    return rows


def page(record: Mapping[str, Any]) -> str:
    """The section."""
    head = "from", "to", "sent", "by gathering all", "part of that", "busiest rank sends", "rounds"
    rows = []
    for r in record["rows"]:
        after = f"{r['after']}{', other ranks' if r['apart'] else ''}"
        share = f"{r['bytes'] / r['gathered']:.2f}"
        sizes = amount(r["bytes"]), amount(r["gathered"]), share, amount(r["busiest"])
        rows.append([r["before"], after, *sizes, str(r["rounds"])])
    return (
        f"`{record['command']}`: bytes that ranks send each other for a move of {MODEL}'s weights\nin bfloat16, by "
        "`plan.transfer`, and those that they would receive if each gathered whole what it needs a part\nof; rounds of "
        f"a bucket of 256 MB. {versions(record)}, {record['date']}.\n\n{table(head, rows)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command("moving", "Moving between layouts", measured, page, 1, __doc__, arguments)


if __name__ == "__main__":
    main()
