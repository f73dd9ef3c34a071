"""A rank's compute of decoder layers beside a hand-written rank's and an eighth of the unsharded layers'.

Shapes of Llama-3 8B and 70B, as rank 0 of 8 in torch's "fake" process group, which sends nothing: forward and backward
with sequence parallelism, eager and compiled; and what the cost model says of it on this device as it was calibrated.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autotp
from autotp.cli.facts import preset
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Layer, Shape, frequencies
from benchmarks.helpers.llama.ways import Sequence, Whole
from benchmarks.helpers.performance import table

from .clock import alone, cluster, compiled, in_turns, median_ratio, settle
from .sizes import Scale

TITLE = "A rank's layers"
HAND, ERROR = 1.03, 0.15  # asked: at most so much of the hand-written rank's time; mean error of the prediction
RATES = "rates"


class Stack(nn.Module):
    """Decoder layers with their rotary positions; a rank's own read and give a slice of the positions."""

    frequencies: Tensor

    def __init__(self, shape: Shape, way: Whole) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(Layer(shape, way) for _ in range(shape.layers)), way
        self.register_buffer("frequencies", frequencies(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same, or this rank's slice of the length."""
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        own = x.shape[1] // self.way.tp
        x = x[:, self.way.rank * own : (self.way.rank + 1) * own]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is measured, by name: the device's rates, and each stack."""
    found: dict[str, Callable[[], Record]] = {RATES: functools.partial(rates, scale)}
    for model, shape in scale.layers.items():
        for tokens in scale.tokens:
            for backend in dict.fromkeys(("eager", scale.backend)):
                found[f"{model}, {tokens} tokens, {backend}"] = functools.partial(stack, scale, shape, tokens, backend)
    return found


def rates(scale: Scale) -> Record:
    """Rates of this device by `autotp.calibrate`, beside those of its preset."""
    found = cluster(scale.device)
    name = preset(torch.cuda.get_device_name()) if scale.device == "cuda" else "local"
    known = autotp.Cluster.preset(name) if name else None
    names = [n for n in ("float32", "bfloat16") if n in found.peak_flops]
    measured = {f"{n}, TFLOP/s": found.peak(n) / 1e12 for n in names}
    measured |= {"memory, TB/s": found.memory_bandwidth / 1e12, "launch, us": found.launch_overhead * 1e6}
    described: dict[str, float] = {}
    if known is not None:
        described = {f"{n}, TFLOP/s": known.peak(n) / 1e12 for n in names}
        described |= {"memory, TB/s": known.memory_bandwidth / 1e12, "launch, us": known.launch_overhead * 1e6}
    return {"preset": name, "measured": measured, "described": described}


def stack(scale: Scale, shape: Shape, tokens: int, backend: str) -> Record:
    """Seconds of forward and backward: unsharded, a hand-written rank's, and autotp's; and predictions.

    Args:
        scale: how it runs. shape: of the layers. tokens: in one sequence.
        backend: "eager", or one of `torch.compile`, for all of them.
    """
    with torch.device(scale.device):
        whole = Stack(shape, Whole()).to(scale.device, scale.dtype)
        x = torch.randn(1, tokens, shape.hidden, dtype=scale.dtype)
    described, pins = cluster(scale.device), {":input.x": Shard(1), ":output": Shard(1)}
    options: dict[str, Any] = {"example_inputs": x, "check_capture": False, "cluster": described}
    alone_plan = autotp.plan(whole, 1, **options)
    with alone(scale.tp) as group:
        mesh = init_device_mesh(scale.device, (scale.tp,), mesh_dim_names=("tp",))
        with torch.device(scale.device):
            hand = Stack(shape, Sequence(0, scale.tp, group)).to(scale.device, scale.dtype)
        plan = autotp.plan(whole, scale.tp, sequence_parallel=True, pins=pins, outputs="sharded", **options)
        part = autotp.parallelize(whole, plan, mesh, example_inputs=x, backend=backend)
        modules = {"whole": compiled(whole, backend), "hand": compiled(hand, backend), "autotp": part}
        steps = {name: functools.partial(step, module, x) for name, module in modules.items()}
        first = {name: _first(call, scale.device) for name, call in steps.items()}
        times = in_turns(steps, scale.device, scale.rounds)
        fired = list(part.plan.fired)
    terms = plan.totals.terms
    return {
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "of hand": median_ratio(times["autotp"], times["hand"]),
        "of an eighth": scale.tp * median_ratio(times["autotp"], times["whole"]),
        "predicted": {
            "whole": alone_plan.totals.passes,
            "autotp": terms.get("compute", 0.0) + terms.get("launches", 0.0),
        },
        "first": first,
        "fired": fired,
    }


def step(module: Any, x: Tensor) -> None:
    """Forward, and backward from ones; gradients are made anew."""
    for p in module.parameters():
        p.grad = None
    y = module(x)
    y = y.to_local() if isinstance(y, DTensor) else y
    y.backward(torch.ones_like(y))


def _first(call: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    call()
    settle(device)
    call()  # what is left to make at a second call
    return time.perf_counter() - began


def errors(results: Mapping[str, Record]) -> list[float]:
    """Relative errors of the predictions of what runs operator by operator, as the cost model prices it."""
    eager = [r for name, r in results.items() if name.endswith("eager")]
    return [abs(r["predicted"][n] / r["seconds"][n] - 1) for r in eager for n in ("whole", "autotp")]


def section(results: Mapping[str, Record]) -> str:
    """Tables of what was found."""
    parts = []
    if RATES in results:
        parts.append(_rates(results[RATES]))
    stacks = {name: r for name, r in results.items() if name != RATES}
    head = ["", "unsharded, ms", "hand-written, ms", "autotp, ms", f"of hand-written, asked {HAND}", "of an eighth",
            "predicted, ms", "unsharded, predicted"]  # fmt: skip
    rows = []
    for name, r in stacks.items():
        ms = {n: f"{1e3 * s:.3f}" for n, s in r["seconds"].items()}
        predicted = [f"{1e3 * r['predicted'][n]:.3f}" for n in ("autotp", "whole")]
        ratios = [f"{r['of hand']:.3f}{' missed' * (r['of hand'] > HAND)}", f"{r['of an eighth']:.2f}"]
        rows.append([name, ms["whole"], ms["hand"], ms["autotp"], *ratios, *predicted])
    if rows:
        parts.append(table(head, rows))
    if off := errors(stacks):
        mean = statistics.mean(off)
        told = f"Mean error of the predictions of eager stacks: {mean:.0%} (asked: at most {ERROR:.0%}; "
        parts.append(told + f"{'missed' if mean > ERROR else 'reached'}).\n")
    return "\n".join(parts)


def _rates(found: Record) -> str:
    rows = []
    for name, measured in found["measured"].items():
        known = found["described"].get(name)
        rows.append(
            [name, f"{measured:.4g}", f"{known:.4g}" if known else "-", f"{measured / known:.2f}" if known else "-"]
        )
    told = (
        "The memory's rate is in the cost model's units, which count a backward as twice its forward: GeLU's four "
        "transfers as six.\n\n"
    )
    return told + table(["", "measured", f"preset {found['preset'] or '(none)'}", "ratio"], rows)
