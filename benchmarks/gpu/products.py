"""FP8 products beside bfloat16's, at the sizes of 8B and 70B ranks; and the rates that they reach, beside presets'."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

import autotp
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import table

from .clock import attempted, in_turns, median_ratio
from .sizes import Scale

TITLE = "FP8 products"
BF16, TENSORWISE, ROWWISE = "bfloat16", "tensorwise", "rowwise"
FP8 = torch.float8_e4m3fn
REPEAT = 20  # calls without waiting, which one figure is the mean of


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is measured, by name."""
    return {name: functools.partial(product, scale, *size) for name, size in scale.products.items()}


def product(scale: Scale, rows: int, inner: int, columns: int) -> Record:
    """Seconds of [rows, inner] by [inner, columns], and the largest error of FP8's, of the largest value.

    Args:
        scale: how it runs. rows, inner, columns: sizes.
    """
    x = torch.randn(rows, inner, device=scale.device, dtype=torch.bfloat16)
    w = torch.randn(columns, inner, device=scale.device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], Tensor]] = {BF16: lambda: x @ w.T}
    exact, found = ways[BF16]().float(), Record()
    for name, dims, recipe in ((TENSORWISE, None, ScalingType.TensorWise), (ROWWISE, 1, ScalingType.RowWise)):
        way = scaled(x, w, dims, recipe)
        checked = attempted(lambda way=way: {"off": float((way().float() - exact).abs().max() / exact.abs().max())})
        if "off" in checked:
            ways[name] = way
        found[name] = checked
    times = in_turns(ways, scale.device, scale.rounds, REPEAT)
    flops = 2.0 * rows * inner * columns
    return {
        "size": [rows, inner, columns],
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "speed": {name: median_ratio(times[BF16], each) for name, each in times.items()},
        "rates": {name: flops / statistics.median(each) for name, each in times.items()},
        "checked": found,
    }


def scaled(x: Tensor, w: Tensor, dim: int | None, recipe: ScalingType) -> Callable[[], Tensor]:
    """The product x @ w.T of FP8 operands, which are made once.

    Args:
        x: [rows, inner]. w: [columns, inner].
        dim: that a scale is of; None for one scale of all. recipe: the same in torch's words.
    """
    (a, of_a), (b, of_b) = _quantised(x, dim), _quantised(w, dim)
    of_b = of_b if dim is None else of_b.T
    return lambda: scaled_mm(a, b.T, of_a, recipe, of_b, recipe, output_dtype=torch.bfloat16)


def _quantised(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """FP8 numbers, and what they are to be multiplied by."""
    largest = x.abs().float().max().view(1) if dim is None else x.abs().float().amax(dim, keepdim=True)
    scale = largest / torch.finfo(FP8).max
    return (x.float() / scale).to(FP8), scale


def section(results: Mapping[str, Record]) -> str:
    """Tables of what was found."""
    head = ["", "rows x inner x columns", "bfloat16, us"]
    head += [f"{way}, {what}" for way in (TENSORWISE, ROWWISE) for what in ("us", "speed")]
    rows = []
    for name, r in results.items():
        cells = [name, " x ".join(map(str, r["size"])), f"{1e6 * r['seconds'][BF16]:.1f}"]
        for way in (TENSORWISE, ROWWISE):
            told = way in r["seconds"]
            cells += [f"{1e6 * r['seconds'][way]:.1f}", f"{r['speed'][way]:.2f}"] if told else ["-", "-"]
        rows.append(cells)
    return f"""\
Operands are FP8 already; the speed is bfloat16's time over theirs.

{table(head, rows)}
The highest rates of these, beside what presets say:

{table(["", "measured, TFLOP/s", *PRESETS], best(results))}"""


PRESETS = ("h100", "h200", "a100", "l40s")


def best(results: Mapping[str, Record]) -> list[list[str]]:
    """The highest rate of each kind of product, and what each preset has for its dtype."""
    rows = []
    for dtype, ways in (("bfloat16", (BF16,)), ("float8_e4m3fn", (TENSORWISE, ROWWISE))):
        for way in ways:
            reached = max((r["rates"][way] for r in results.values() if way in r["rates"]), default=0.0)
            known = [autotp.Cluster.preset(name).peak_flops.get(dtype) for name in PRESETS]
            rows.append([way, f"{reached / 1e12:.4g}", *(f"{x / 1e12:.4g}" if x else "-" for x in known)])
    return rows
