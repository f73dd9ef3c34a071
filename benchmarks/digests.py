"""What it costs a load that bytes are checked by digests: `python -m benchmarks.digests [--write]`.

Two gloo processes of one thread each load a stack of layers in the shapes of an 8B Llama's, 0.9 GB in bfloat16, which
they have saved: with the digests that lie beside the files, and as if there were none. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from autotp.runtime import state
from autotp.runtime.checkpoint.loading import materialise
from benchmarks.helpers.command import made
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import interleaved, ratio
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import table, write_section

HEADING = "Digests of a checkpoint"
RANKS, BLOCKS, WIDTH, INNER, ROUNDS = 2, 4, 4096, 14336, 15
LIMIT = 0.03  # of the CPU seconds of a load into new memory
NEW, THERE = "into new memory", "again, into memory that is there"
WITHOUT = ", without"


class Block(nn.Module):
    """Weights that are split by rows, and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of a layer that adds to its input."""
        return x + self.down(nn.functional.silu(self.up(x)))


class Load:
    """A load, by `digests` or as if there were none, of weights that are on the meta device before it if `new`."""

    def __init__(self, sharded: Any, folder: Path, digests: bool, new: bool, optimizer: Any = None) -> None:
        self.sharded, self.folder, self.optimizer = sharded, folder, optimizer
        self.name, self.new = "autotp.digests.json" if digests else "none", new

    def ready(self) -> None:
        """Give the memory back."""
        if self.new and self.optimizer is None:
            empty = {p: materialise(p, torch.device("meta")) for p in self.sharded.parameters()}
            state.install(self.sharded._shards, empty)
        if self.new and self.optimizer is not None:
            self.optimizer.state.clear()

    def __call__(self) -> None:
        """Load."""
        with patch("autotp.runtime.checkpoint.checked.DIGESTS", self.name):
            self.sharded.load_checkpoint(self.folder, optimizer=self.optimizer)


def loads(sharded: Any, folder: Path) -> dict[str, Callable[[], None]]:
    """What is timed; the weights are there when an optimizer's states are loaded."""
    out: dict[str, Callable[[], None]] = {}
    for digests in (True, False):
        for new in (True, False):
            for name in ("safetensors", "DCP"):
                text = f"{name}, {NEW if new else THERE}{'' if digests else WITHOUT}"
                out[text] = Load(sharded, folder / name, digests, new)
    return out


def measured(rounds: int, folder: str) -> dict[str, list[float]]:
    """This rank's CPU seconds of each load, by round."""
    logging.getLogger("autotp").setLevel(logging.ERROR)
    torch.manual_seed(0)
    place = Path(folder)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).bfloat16()
    sharded: Any = autotp.compile(model, RANKS, example_inputs=torch.zeros(2, WIDTH).bfloat16())
    sharded.save_checkpoint(place / "safetensors", format="huggingface")
    sharded.save_checkpoint(place / "DCP")
    times = interleaved(loads(sharded, place), rounds, before=dist.barrier)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for p in sharded.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    sharded.zero_grad()
    sharded.save_checkpoint(place / "DCP", optimizer=optimizer)
    states = f"DCP with momenta, these {NEW}"
    more = {states + ("" if digests else WITHOUT): Load(sharded, place / "DCP", digests, True, optimizer) for digests in (True, False)}
    times |= interleaved(more, rounds, before=dist.barrier)
    return {name: each.cpu for name, each in times.items()}


def run(rounds: int) -> dict[str, Record]:
    """By load: medians over the rounds of both ranks together, with and without, and of their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        everyone = on_ranks(functools.partial(measured, rounds, folder), RANKS)
    out: dict[str, Record] = {}
    for name in everyone[0]:
        if name.endswith(WITHOUT):
            continue
        checked, plain = ([sum(x) for x in zip(*(found[key] for found in everyone), strict=True)] for key in (name, name + WITHOUT))
        out[name] = {"with_s": statistics.median(checked), "without_s": statistics.median(plain), "min": min(checked)/min(plain), "ratio": ratio(checked, plain)}
    return out

if __name__ == "__main__":
    import sys
    for k,v in run(int(sys.argv[1])).items(): print(k,v)
