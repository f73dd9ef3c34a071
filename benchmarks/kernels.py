"""Kernels on a CUDA device: time and bandwidth, beside a device copy, eager PyTorch, and what Inductor makes.

    python -m benchmarks.kernels           # prints the tables
    python -m benchmarks.kernels --write   # and writes the section of docs/performance.md

Sizes of one rank of Llama 8B and 70B at tp=8, 8192 tokens, float32 and bfloat16; a forward without gradients, and a
forward with its backward. Medians of interleaved rounds; before each run the device's cache is emptied. Without a
device it says so, and leaves the tables as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.helpers.command import made
from benchmarks.helpers.kernel_work import MODELS, WORK, Sizes, Work
from benchmarks.helpers.performance import PAGE, table, write_section

HEADING = "Kernels"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = "kernel", "eager", "Inductor"
COPIED = 2**30  # bytes of the copy that bandwidths are compared with
UNMEASURED = """\
`python -m benchmarks.kernels --write`, on a machine with a CUDA device. No such machine was at hand: the kernels are
tested against float64 under Triton's interpreter and compiled for sm_90, but **they have run on no device, and their
speed has not been measured**. A run measures them on its own device before it uses them
([measured](compiled.md#measured-on-your-device)).
"""


def step(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any], graded: int) -> tuple[Any, Any]:
    """Outputs and gradients of a forward and backward, whose gradients come as random values."""
    draw = torch.Generator(inputs[0].device).manual_seed(0)
    given = [x.detach().requires_grad_() if i < graded else x for i, x in enumerate(inputs)]
    outs = function(*given)
    grads = [torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=draw) for x in outs]
    return tuple(x.detach() for x in outs), torch.autograd.grad(outs, given[:graded], grads)


def apart(work: Work, inputs: Sequence[Any]) -> float:
    """Largest difference of an output or gradient of the kernel from eager PyTorch's, over the largest value."""
    pairs = zip(*(sum(step(f, inputs, work.graded), ()) for f in (work.kernel, work.plain)), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def seconds(function: Callable[[], Any]) -> float:
    """Median time of a call on the device."""
    from triton.testing import do_bench  # noqa: PLC0415 - optional, and of use on a device only

    return do_bench(function, warmup=20, rep=60, return_mode="median") / 1e3  # type: ignore[operator]


def calls(work: Work, function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Callable[[], Any], ...]:
    """A forward without gradients, and a forward and backward with gradients that exist already."""
    given = [x.detach().requires_grad_() if i < work.graded else x for i, x in enumerate(inputs)]
    grads = [torch.randn_like(x) for x in function(*given)]

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    def both() -> None:
        torch.autograd.grad(function(*given), given[: work.graded], grads)

    return forward, both


def measured(work: Work, sizes: Sizes, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way: forward, and forward with backward."""
    inputs = work.make(sizes, dtype, "cuda")
    difference = apart(work, inputs)
    if difference > (1e-4 if dtype == torch.float32 else 5e-2):
        raise RuntimeError(f"the kernel differs from eager PyTorch by {difference:.1e} of the largest value")
    torch.compiler.reset()
    ways = dict(zip(WAYS, (work.kernel, work.plain, torch.compile(work.plain, fullgraph=True)), strict=True))
    prepared = {way: calls(work, function, inputs) for way, function in ways.items()}
    found: dict[str, list[list[float]]] = {way: [[], []] for way in WAYS}
    for _ in range(rounds):
        for way, functions in prepared.items():
            for times, function in zip(found[way], functions, strict=True):
                times.append(seconds(function))
    return {way: [statistics.median(t) for t in times] for way, times in found.items()}


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a device copy."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source))


def row(name: str, work: Work, sizes: Sizes, dtype: torch.dtype, times: dict[str, list[float]], copy: float) -> Any:
    """A line of the table."""
    cells = [name]
    for at, elements in enumerate(work.elements(sizes)):
        kernel, eager, inductor = (times[way][at] for way in WAYS)
        share = elements * dtype.itemsize / kernel / copy
        cells += [f"{1e6 * kernel:.0f}", f"{100 * share:.0f}%", f"{eager / kernel:.2f}", f"{inductor / kernel:.2f}"]
    return cells


def faster(results: dict[str, list[dict[str, list[float]]]]) -> list[str]:
    """The kernels that beat Inductor in every line, forward and with backward; variants count as one."""
    won: dict[str, bool] = {}
    for name, lines in results.items():
        kernel = name.partition(",")[0]
        better = all(t["kernel"][at] < t["Inductor"][at] for t in lines for at in (0, 1))
        won[kernel] = won.get(kernel, True) and better
    return [kernel for kernel, better in won.items() if better]


def section(rows: Sequence[Sequence[str]], better: Sequence[str], copy: float, about: dict[str, str]) -> str:
    """The text under the heading."""
    head = ["", *(f"{x}{y}" for y in ("", " with backward") for x in ("µs", "of a copy", "eager", "Inductor"))]
    return (
        f"`{about['command']}`: time of each kernel, its bandwidth as a share of a device copy's "
        f"({copy / 1e12:.2f} TB/s read and written), and how many times as long eager PyTorch and Inductor take.\n"
        f"Faster than Inductor in every line: {', '.join(better) or 'none'}.\n\n{table(head, rows)}\n"
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, {about['date']}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that the medians are of (default 5)")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured, and the table stays as it is.")
        if given.write and f"## {HEADING}\n" not in PAGE.read_text(encoding="utf-8"):
            write_section(HEADING, UNMEASURED)
        return
    copy, rows, results = copy_bandwidth(), [], {}
    lines = [(name, model, dtype) for name in WORK for model in MODELS for dtype in DTYPES]
    for name, model, dtype in track(lines, "measuring", console=Console(stderr=True), transient=True):
        times = measured(WORK[name], MODELS[model], DTYPES[dtype], given.rounds)
        results.setdefault(name, []).append(times)
        rows.append(row(f"{name}; {model}, {dtype}", WORK[name], MODELS[model], DTYPES[dtype], times, copy))
    about = {"device": torch.cuda.get_device_name(), "triton": importlib.metadata.version("triton")}
    text = section(rows, faster(results), copy, {**made("benchmarks.kernels", arguments), **about})
    print(text)
    if given.write:
        write_section(HEADING, text)


if __name__ == "__main__":
    main()
