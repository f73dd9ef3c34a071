"""Every kernel beside torch's operators, Inductor's code and a copy of the same bytes, for ranks of 8B and 70B."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotp.runtime.lower.measured import GAIN
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.kernel_work import DTYPES, WORK, apart, calls
from benchmarks.helpers.performance import table

from .clock import compiled, in_turns, median_ratio
from .sizes import Scale

TITLE = "Kernels"
SHARE = 0.85  # of a copy of the same bytes: asked of what memory bounds
KERNEL, EAGER, COMPILED, COPY = "kernel", "eager", "Inductor", "copy"
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
FORWARD, BOTH = "forward", "with backward"
REPEAT = 10  # calls without waiting, which one figure is the mean of


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is measured, by name: each kernel at each size in each dtype."""
    return {
        f"{name}; {model}, {dtype}": functools.partial(kernel, scale, name, model, dtype)
        for model in scale.kernels
        for dtype in scale.dtypes
        for name in WORK
    }


def kernel(scale: Scale, name: str, model: str, dtype: str) -> Record:
    """Seconds of one kernel and of what it stands for, forward and with backward.

    Args:
        scale: how it runs. name: in `WORK`. model: whose rank's sizes. dtype: "fp32" or "bf16".
    """
    work, sizes, kind = WORK[name], scale.kernels[model], DTYPES[dtype]
    inputs = work.make(sizes, kind, scale.device)
    difference = apart(work, inputs)
    if not difference <= CLOSE[kind]:
        raise RuntimeError(f"the kernel differs from eager PyTorch by {difference:.1e} of the largest value")
    torch.compiler.reset()
    functions = {KERNEL: work.kernel, EAGER: work.plain, COMPILED: compiled(work.plain, scale.backend)}
    prepared = {way: calls(work, function, inputs) for way, function in functions.items()}
    found: Record = {"difference": difference}
    for at, what in enumerate((FORWARD, BOTH)):
        steps: dict[str, Any] = {way: both[at] for way, both in prepared.items()}
        steps[COPY] = _copy(int(work.elements(sizes)[at] * kind.itemsize), scale.device)
        for call in (*steps.values(), *steps.values()):
            call()
        times = in_turns(steps, scale.device, scale.rounds, REPEAT)
        ratios = {way: median_ratio(times[way], times[KERNEL]) for way in (EAGER, COMPILED, COPY)}
        found[what] = {"seconds": {way: statistics.median(each) for way, each in times.items()}, "ratios": ratios}
    return found


def _copy(moved: int, device: str) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def used(record: Record, way: str) -> str:
    """For what a program that would run `way` takes the kernel instead, by the rule of what is measured on a device."""
    names = {FORWARD: "inference", BOTH: "training"}
    found = [name for what, name in names.items() if record[what]["ratios"][way] >= GAIN]
    return " and ".join(found) or "nowhere"


def section(results: Mapping[str, Record]) -> str:
    """A table of what was found."""
    head = [""]
    for what in ("", f" {BOTH}"):
        head += [f"us{what}", f"eager{what}", f"Inductor{what}", f"of a copy{what}"]
    rows = []
    for name, r in results.items():
        cells = [name]
        for what in (FORWARD, BOTH):
            ratios = r[what]["ratios"]
            cells += [f"{1e6 * r[what]['seconds'][KERNEL]:.1f}", f"{ratios[EAGER]:.2f}", f"{ratios[COMPILED]:.2f}"]
            cells.append(f"{ratios[COPY]:.2f}{' missed' * (ratios[COPY] < SHARE)}")
        rows.append([*cells, used(r, EAGER), used(r, COMPILED)])
    head += ["used eagerly", "used under Inductor"]
    return f"""\
Microseconds of the kernel; how many times as long torch's operators and Inductor's code take; and the time of a copy
of the same bytes over the kernel's (asked: {SHARE}). A kernel is used where it is at least {GAIN} times as fast as what
it stands for, in inference forward, in training with its backward: none that is slower than Inductor's code under it.

{table(head, rows)}"""
