"""What each peer does alone, and then beside the others, on the ranks of one group."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autotp
from benchmarks.activations import kept
from benchmarks.helpers.gloo import everywhere
from benchmarks.helpers.interleaved import interleaved
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import sent

from .legs import AUTOTP, TRAIN, Leg, decoder

UPDATES, RATE = 4, 0.1  # of plain SGD, whose losses are compared


def data(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets, [1, length] each, the same on every rank."""
    ids, targets = torch.randint(shape.vocabulary, (2, 1, length), generator=torch.Generator().manual_seed(1))
    return ids, targets


def step_of(leg: Leg, ids: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """Return a step: forward, cross entropy of whole logits, backward."""

    def step() -> Tensor:
        for p in leg.parameters:
            p.grad = None
        loss = nn.functional.cross_entropy(leg.logits(ids).flatten(0, 1), targets.flatten())
        leg.backward(loss)
        return loss.detach()

    return step


def alone(name: str, shape: Shape, length: int) -> Record:
    """Set one peer up in these processes: seconds, losses of updates, bytes sent and kept, and the most memory held."""
    cache = tempfile.TemporaryDirectory()  # removed with this call: nothing is compiled already
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    model, (ids, targets) = untouched(shape), data(shape, length)
    Path("/proc/self/clear_refs").write_text("5")  # the most held is counted from here on
    before, began = held("VmRSS"), time.process_time()
    leg, why = everywhere(lambda: TRAIN[name](model, shape, ids))
    if why:
        return {"refused": why}
    step = step_of(leg, ids, targets)
    loss, why = everywhere(step)
    if why:
        return {"refused": why}
    found: Record = {"set_up_s": time.process_time() - began, "losses": [float(loss)]}
    optimizer = torch.optim.SGD(leg.parameters, lr=RATE)
    for _ in range(UPDATES - 1):
        optimizer.step()
        found["losses"].append(float(step()))
    found["peak"] = held("VmHWM") - before
    if "compiled" not in name:
        calls, found["sent"] = sent(step, dist.get_world_size())
        found["collectives"] = sum(calls.values())
        found["kept"] = kept(_Called(leg), ids)[1]
        found["spent"] = spent(step)
    if name == AUTOTP:
        cluster = autotp.calibrate(show=False, dtypes=(torch.float32,))
        found["roofline_s"] = found["spent"]["flops"] / cluster.peak_flops["float32"]
    return found


def held(what: str) -> int:
    """Bytes of this process in memory, as Linux tells them: VmRSS now, VmHWM at the most."""
    return int(Path("/proc/self/status").read_text().partition(f"{what}:")[2].split()[0]) * 1024


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
PROFILED = 3  # steps whose operators are timed


def spent(step: Callable[[], Tensor]) -> Record:
    """Say where a rank's seconds of a step go, by torch's profiler, and its products' arithmetic.

    Returns: `flops` of the products; seconds of `products`, `collectives` (with waiting for the other rank), and
    `others`, by the clock of the profiler; `python`: CPU seconds of a step in which no operator runs.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    began = time.process_time()
    for _ in range(PROFILED):
        step()
    whole = (time.process_time() - began) / PROFILED
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            step()
    found = {"flops": counter.get_total_flops(), "products": 0.0, "collectives": 0.0, "others": 0.0}
    for row in profiled.key_averages():
        kind = "products" if row.key.startswith(PRODUCTS) else "others"
        if "c10d" in row.key or "gloo" in row.key:
            kind = "collectives"
        if "::" in row.key or kind == "collectives":
            found[kind] += row.self_cpu_time_total / PROFILED / 1e6
    return found | {"step": whole}


class _Called(nn.Module):
    """A leg as a module that is called with ids."""

    def __init__(self, leg: Leg) -> None:
        super().__init__()
        self.leg = leg
        for i, p in enumerate(leg.parameters):
            self.register_parameter(f"p{i}", p)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        return self.leg.logits(ids)


def together(names: Sequence[str], shape: Shape, length: int, rounds: int) -> Record:
    """Time a step of each of these peers in turns: this rank's seconds of each round."""
    model, (ids, targets) = untouched(shape), data(shape, length)
    steps = {name: step_of(TRAIN[name](model, shape, ids), ids, targets) for name in names}
    for step in steps.values():
        step()
    return {name: times._asdict() for name, times in interleaved(steps, rounds, before=dist.barrier).items()}


@torch.no_grad()
def decoded(names: Sequence[str], shape: Shape, prompt: int, rounds: int) -> Record:
    """Time a decoded token of each, and compare its logits with the whole model's: `off`, `times`, and `refused`."""
    model = untouched(shape).eval()
    ids = torch.randint(shape.vocabulary, (1, prompt + 1), generator=torch.Generator().manual_seed(1))
    wanted, steps = model(ids)[:, -1:], {}
    found: Record = {"off": {}, "refused": {}}
    for name in names:
        step, why = everywhere(lambda: decoder(name, model, shape, ids))  # noqa: B023  called at once
        logits, why = everywhere(step) if not why else (None, why)
        if why:
            found["refused"][name] = why
            continue
        found["off"][name] = float((logits - wanted).abs().max() / wanted.abs().max())
        steps[name] = step
    found["times"] = {name: times._asdict() for name, times in interleaved(steps, rounds, before=dist.barrier).items()}
    return found
