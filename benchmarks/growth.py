"""Growth of planning: CPU seconds of its stages over what a model has more of, with fitted exponents.

    python -m benchmarks.growth                # prints the table and a JSON line
    python -m benchmarks.growth --only loop    # one family
    python -m benchmarks.growth --write        # and the section of docs/performance.md

Each family (`FAMILIES`) has one thing n times, n from 1 to 64. Two gloo ranks; the seconds are rank 0's.
An exponent is that of the last step, from 16 to 64: what a stage takes whatever the model would hide the growth of the
smaller ones. A stage that takes less than `LEAST` at 64 has none.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options
from autotp.inputs import Inputs
from benchmarks.helpers.command import made, versions
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import table, write_section

HEADING = "Growth of planning"
RANKS, TIMES, LEAST = 2, (1, 4, 16, 64), 0.1
WIDTH, LENGTH, HEADS = 64, 8, 4
# stages within others -> the functions that they are
STAGES = {
    "comparison": ("autotp.capture.selfcheck.Trial.compare",),
    "problem": ("autotp.driver.compile._builder", "autotp.passes.shard.planner.Builder.build"),
    "solve": ("autotp.passes.shard.decide.solve",),
    "rewrite": ("autotp.driver.compile._sharded",),
    "describe": ("autotp.driver.compile.describe",),
}


class Branches(nn.Module):
    """Feed-forward branches of these widths, whose results are added to what they read."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.ParameterList(torch.randn(wide, WIDTH) / WIDTH for wide in widths)
        self.last = nn.ParameterList(torch.randn(WIDTH, wide) / wide for wide in widths)

    def forward(self, x: Tensor) -> Tensor:
        for first, last in zip(self.first, self.last, strict=True):
            x = x + F.linear(F.gelu(F.linear(x, first)), last)
        return x


class Layer(nn.Module):
    """Attention by heads and a feed-forward branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.branch = nn.Linear(WIDTH, WIDTH), Branches([4 * WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.branch(x + self.out(attended.transpose(1, 2).flatten(2)))


class Recurrence(nn.Module):
    """A gated cell, unrolled over so many steps of time."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.enter, self.recur = steps, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(self.steps):
            gate, value = (self.enter(x[:, t]) + self.recur(h)).chunk(2, -1)
            h = h + gate.sigmoid() * (value.tanh() - h)
            out.append(h)
        return torch.stack(out, 1)


class Pyramid(nn.Module):
    """A branch applied to each of several inputs, which all have a size of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Branches([4 * WIDTH])

    def forward(self, *levels: Tensor) -> Tensor:
        return torch.stack([self.branch(x).mean(1) for x in levels]).sum(0)


def sequence(*lengths: int) -> tuple[Tensor, ...]:
    """Example inputs of these lengths."""
    return tuple(torch.randn(2, length, WIDTH) for length in lengths)


# what there is n of -> the model and its example inputs
FAMILIES: dict[str, Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "depth": lambda n: (nn.Sequential(*(Layer() for _ in range(n))), sequence(LENGTH)),
    "operators of a block": lambda n: (nn.Sequential(*(Branches([WIDTH] * n) for _ in range(4))), sequence(LENGTH)),
    "different blocks": lambda n: (nn.Sequential(*(Branches([WIDTH + 8 * i]) for i in range(n))), sequence(LENGTH)),
    "loop": lambda n: (Recurrence(n), sequence(n)),
    "sizes": lambda n: (Pyramid(), sequence(*(LENGTH + i for i in range(n)))),
}


@contextmanager
def clocked(seconds: Record) -> Iterator[None]:
    """Add the CPU seconds of each of `STAGES` to a record."""

    def around(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[key] = seconds.get(key, 0.0) + time.process_time() - began

        return timed

    with ExitStack() as stack:
        for key, names in STAGES.items():
            for name in names:
                stack.enter_context(patch(name, around(key, pkgutil.resolve_name(name))))
        yield


def point(family: str, n: int) -> Record:
    """CPU seconds of this rank for one model, by stage."""
    torch.manual_seed(0)
    model, args = FAMILIES[family](n)
    inputs, device, seconds = Inputs(*args), torch.device("cpu"), Record()

    def timed(key: str, function: Callable[[], Any]) -> Any:
        began = time.process_time()
        out = function()
        seconds[key] = time.process_time() - began
        return out

    captured: tuple[Any, ...] = ()
    plans: list[Any] = [None]
    if dist.get_rank() == 0:
        capture_model(Layer(), Inputs(*sequence(LENGTH)), device)  # what is imported at the first one
        with clocked(seconds):
            captured = timed("capture", lambda: capture_model(model, inputs, device, True))
            plans = [timed("plan", lambda: solve_plan(captured[0], captured[1], Options.read(RANKS), family))]
        seconds["capture"] -= seconds["comparison"]
    dist.broadcast_object_list(plans)
    with patch("autotp.driver.compile.capture_model", lambda *_: captured):
        sharded = timed("sharded module", lambda: autotp.compile(model, plan=plans[0], example_inputs=inputs))
    timed("first call", lambda: sharded(*args))
    return seconds


def exponent(few: float, many: float) -> float | None:
    """The growth of a stage from the last but one of `TIMES` to the last; None where it takes too little to say."""
    return math.log(many / max(few, 1e-3)) / math.log(TIMES[-1] / TIMES[-2]) if many >= LEAST else None


def points(families: Sequence[str]) -> dict[str, list[Record]]:
    """By family: CPU seconds of this rank at each of `TIMES`."""
    return {family: [point(family, n) for n in TIMES] for family in families}


def measured(families: Sequence[str]) -> dict[str, Record]:
    """By family: CPU seconds of each stage at each of `TIMES`, and its exponent."""
    rows = {}
    for family, records in on_ranks(functools.partial(points, families), RANKS)[0].items():
        stages = {key: [round(one.get(key, 0.0), 3) for one in records] for key in records[-1]}
        rows[family] = {key: {"seconds": all_, "exponent": exponent(*all_[-2:])} for key, all_ in stages.items()}
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="these families")
    given = parser.parse_args(arguments)
    before, rows = os.getloadavg()[0], measured(given.only)
    record = {"benchmark": "growth", **made("benchmarks.growth", arguments), "load_before": round(before, 1)}
    record |= {"ranks": RANKS, "times": TIMES, "rows": rows}
    shown = page(record)
    print(shown)
    if given.write:
        write_section(HEADING, shown)
    print(json.dumps(record))


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = ["n times", "stage", *(f"n = {n}" for n in record["times"]), "exponent"]
    cells = []
    for name, stages in record["rows"].items():
        for stage, figures in stages.items():
            power = figures["exponent"]
            seconds = [f"{s:.2f}" for s in figures["seconds"]]
            cells.append([name, stage, *seconds, "" if power is None else f"{power:.2f}"])
    return f"""\
`{record["command"]}`: CPU seconds of rank 0 of {record["ranks"]} over n; the exponent is that from n = {TIMES[-2]}
to n = {TIMES[-1]} of what takes {LEAST} s there. The comparison is that of the capture with the model; problem, solve,
rewrite and describe are parts of the plan. {os.cpu_count()} cores of {record["machine"]};
{versions(record)}, {record["date"]}, load average {record["load_before"]} before.

{table(head, cells)}"""


if __name__ == "__main__":
    main()
