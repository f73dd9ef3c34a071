"""One rank's compute on one GPU beside an eighth of the unsharded layer: `python -m benchmarks.gpu [--write]`.

A layer of Llama-3-8B and of Llama-3-70B (shapes of the published configs) in bfloat16, as rank 0 of 8 in torch's "fake"
process group, which sends nothing: forward and backward, eager and by Inductor, and the first call. Without a GPU it
says so and leaves docs/performance.md as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from benchmarks.helpers.command import made
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.megatron import Layer, Shape, frequencies
from benchmarks.helpers.performance import table, write_section
from benchmarks.helpers.ways import Whole

from .hand_plans import FakeStore

HEADING = "One rank's compute on a GPU"
TP, ROUNDS = 8, 20
SHAPES = {
    "Llama-3-8B": Shape(hidden=4096, layers=1, heads=32, kv_heads=8, wide=14336, vocabulary=128256),
    "Llama-3-70B": Shape(hidden=8192, layers=1, heads=64, kv_heads=8, wide=28672, vocabulary=128256),
}
TOKENS = (1024, 8192)
BACKENDS = ("eager", "inductor")


class Block(nn.Module):
    """One decoder layer with its rotary positions."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = Layer(shape, Whole())
        self.register_buffer("frequencies", frequencies(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same."""
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return self.layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


@contextmanager
def alone(tp: int) -> Iterator[None]:
    """Rank 0 of `tp` that send nothing; it agrees with itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        with mock.patch.object(dist, "all_gather_object", _from_itself):
            yield
    finally:
        dist.destroy_process_group()


def _from_itself(everyone: list[Any], own: Any, group: Any) -> None:
    everyone[:] = [own] * len(everyone)


def measure(shape: Shape, tokens: int, backend: str, device: str, tp: int = TP, rounds: int = ROUNDS) -> Record:
    """Seconds of a step of the whole layer and of one rank's part of it, and of the first call of that.

    Args:
        shape: of the layer. tokens: in one sequence.
        backend: "eager" or "inductor", for both. device: "cuda" or "cpu".
    """
    with torch.device(device):
        block = Block(shape).to(torch.bfloat16)
        x = torch.randn(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    with alone(tp):
        mesh = init_device_mesh(device, (tp,), mesh_dim_names=("tp",))
        plan = autotp.plan(block, tp, example_inputs=x, sequence_parallel=True, check_capture=False)
        part = autotp.parallelize(block, plan, mesh, example_inputs=x, backend=backend)
        began = time.perf_counter()
        _step(part, x)
        _settle(device)
        first = time.perf_counter() - began
        whole = block if backend == "eager" else torch.compile(block, backend=backend)
        steps = {"whole": lambda: _step(whole, x), "part": lambda: _step(part, x)}  # type: ignore[arg-type]
        found = {name: _timed(step, device, rounds) for name, step in steps.items()}
    return {**found, "first": first, "ratio": found["part"] / (found["whole"] / tp)}


def _step(module: nn.Module, x: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(torch.ones_like(y))


def _timed(step: Callable[[], None], device: str, rounds: int) -> float:
    """The median of so many steps, after two that do not count."""
    times = []
    for _ in range(rounds + 2):
        _settle(device)
        began = time.perf_counter()
        step()
        _settle(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was measured, and docs/performance.md stays as it is.")
        return
    results = {
        f"{name}, {tokens} tokens, {backend}": measure(shape, tokens, backend, "cuda")
        for name, shape in SHAPES.items()
        for tokens in TOKENS
        for backend in BACKENDS
    }
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    record = {"benchmark": "gpu", **made("benchmarks.gpu", arguments), "device": device, "results": results}
    print(page(record))
    print(json.dumps(record))
    if given.write:
        write_section(HEADING, page(record))


def page(record: Record) -> str:
    """The section of docs/performance.md."""
    head = ["", f"layer / {TP}, ms", "one rank, ms", "ratio", "first call, s"]
    cells = [
        [n, f"{1e3 * r['whole'] / TP:.3f}", f"{1e3 * r['part']:.3f}", f"{r['ratio']:.2f}", f"{r['first']:.1f}"]
        for n, r in record["results"].items()
    ]
    return f"""\
`{record["command"]}`: forward and backward of one layer in bfloat16, whole and divided by {TP}, and as one of {TP}
ranks computes it under autotp's sequence-parallel plan, whose collectives send nothing here. {record["device"]};
torch {record["torch"]}, Python {record["python"]}, {record["date"]}.

{table(head, cells)}"""


if __name__ == "__main__":
    main()
