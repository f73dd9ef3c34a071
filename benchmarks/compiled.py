"""Inductor on the models of the test suite: as eager; and the first step of 32 layers beside that of 2.

Two gloo processes of one thread each; Inductor's caches are off. Command: `python -m benchmarks.compiled [--write]`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

import autotp
from benchmarks.helpers.command import made
from benchmarks.helpers.performance import table, write_section
from tests.helpers.models import TWELVE, inputs_of, transformer

RANKS, SHALLOW, DEEP = 2, 2, 32
TITLE = "Compiled by Inductor"


def start(rank: int, folder: str) -> None:
    """Join the gloo processes."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def forget(rank: int, folder: str, name: str) -> None:
    """Compile anew: nothing of earlier compilations in memory or on disk."""
    torch.compiler.reset()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / f"{name}-{rank}")


def step(module: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The logits and the seconds of a forward and backward."""
    began = time.perf_counter()
    logits = module(**inputs).logits
    logits.square().mean().backward()
    return logits.detach(), time.perf_counter() - began


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def compare(model: Any) -> list[str]:
    """One model: parts and functions, first call, second call, and differences from the same module run eagerly."""
    inputs, modules = inputs_of(model), {}
    for backend in ("eager", "inductor"):
        modules[backend] = autotp.compile(model, example_inputs=inputs, backend=backend)
    eager, fast = modules["eager"], modules["inductor"]
    wanted, _ = step(eager, inputs)
    found, first = step(fast, inputs)
    grads = [m.full_grad_dict() for m in (fast, eager)]
    largest = max(float(g.abs().max()) for g in grads[1].values())
    gradient = max(float((grads[0][n] - g).abs().max()) for n, g in grads[1].items()) / largest
    with torch.no_grad():
        inference = apart(fast(**inputs).logits, eager(**inputs).logits)
    told = next(line for line in fast.plan.fired if line.startswith("inductor"))
    counts = [word for word in told.replace(":", " ").split() if word.isdigit()]
    return [*counts, f"{first:.1f}", *(f"{x:.0e}" for x in (apart(found, wanted), gradient, inference))]


def depths(rank: int, folder: str, out: str) -> None:
    """Seconds of the first step for few layers and for many."""
    start(rank, folder)
    for layers in (1, SHALLOW, DEEP):  # the first loads the compiler
        forget(rank, folder, str(layers))
        model: Any = transformer("llama", num_hidden_layers=layers)
        module = autotp.compile(model, example_inputs=inputs_of(model), backend="inductor")
        _, seconds = step(module, inputs_of(model))
        if rank == 0 and layers > 1:
            with open(out, "a", encoding="utf-8") as file:
                file.write(f"{seconds}\n")


def models(rank: int, folder: str, out: str) -> None:
    """A line for each of the twelve models."""
    start(rank, folder)
    for name in TWELVE:
        forget(rank, folder, name)
        cells = compare(transformer(name))
        if rank == 0:
            print(name, *cells, flush=True)
            with open(out, "a", encoding="utf-8") as file:
                file.write("\t".join((f"`{name}`", *cells)) + "\n")


def run(what: Any) -> list[str]:
    """The lines that rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "lines")
        mp.spawn(what, args=(folder, out), nprocs=RANKS)  # type: ignore[attr-defined]
        return Path(out).read_text(encoding="utf-8").splitlines()


def text(rows: Sequence[str], seconds: Sequence[float], with_: dict[str, str]) -> str:
    """The section of docs/performance.md."""
    head = ("model", "parts", "functions", "first step, s", "outputs", "gradients", "inference")
    few, many = seconds
    return f"""\
The tiny models of the test suite (2 layers, float32) over {RANKS} gloo processes, a training step and a forward without
gradients. "parts" are what a program is cut into, "functions" what is left to compile after equal ones; the last
three columns are the largest difference from the same module run eagerly, as a part of the largest value.

{table(head, [row.split(chr(9)) for row in rows])}
A Llama of {SHALLOW} layers takes {few:.1f} s for its first step, one of {DEEP} layers {many:.1f} s: {many / few:.2f} times as long. Inductor's
caches were off.

`{with_["command"]}`, autotp {with_["autotp"]}, torch {with_["torch"]}, transformers {with_["transformers"]}, Python {with_["python"]}, {with_["machine"]}, {with_["date"]}.
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and with --write rewrite the section of docs/performance.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the section of docs/performance.md")
    given = parser.parse_args(arguments)
    seconds = [float(line) for line in run(depths)]
    found = text(run(models), seconds, made("benchmarks.compiled", arguments))
    print(found)
    if given.write:
        write_section(TITLE, found)


if __name__ == "__main__":
    main()
