"""What it costs that a load checks digests: `python -m benchmarks.digests [--write]`.

Two gloo processes of one thread each load a stack of layers in the shapes of an 8B Llama's, 0.9 GB in bfloat16, from
files that they have saved: on the disk, or in the page cache; with the digests beside them, and as if there were none.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from autotp.runtime import state
from autotp.runtime.checkpoint.folders import DIGESTS
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.interleaved import interleaved, ratio
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import command, table

HEADING = "Digests of a checkpoint"
RANKS, BLOCKS, WIDTH, INNER, ROUNDS = 2, 4, 4096, 14336, 15
WITHOUT, COLD = " without", ", from the disk, by the clock"


class Block(nn.Module):
    """Weights that are split by rows, and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        return x + self.down(nn.functional.silu(self.up(x)))


class Load:
    """A load with digests, or as if there were none.

    Args:
        new: what is loaded has no memory before. cold: nor have the files.
    """

    def __init__(
        self, sharded: Any, folder: Path, digests: bool, new: bool, optimizer: Any = None, cold: bool = False
    ) -> None:
        self.sharded, self.folder, self.optimizer, self.cold = sharded, folder, optimizer, cold
        self.file, self.new = DIGESTS if digests else "none", new

    def ready(self) -> None:
        """Give the memory back: the weights', or where an optimizer is loaded that of its states; and the files'."""
        for file in filter(Path.is_file, self.folder.rglob("*") if self.cold else ()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self.optimizer is not None:
            self.optimizer.state.clear()
        elif self.new:
            empty = {p: torch.empty_like(p, device="meta") for p in self.sharded.parameters()}
            state.install(self.sharded._shards, empty)

    def __call__(self) -> None:
        """Load."""
        with patch("autotp.runtime.checkpoint.digests.DIGESTS", self.file):
            self.sharded.load_checkpoint(self.folder, optimizer=self.optimizer)


def measured(rounds: int, folder: str) -> dict[str, list[float]]:
    """This rank's CPU seconds of each load, by round; those by the clock of what is read from the disk."""
    logging.getLogger("autotp").setLevel(logging.ERROR)
    torch.manual_seed(0)
    place, ways = Path(folder), (("", True), (WITHOUT, False))
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).bfloat16()
    sharded: Any = autotp.compile(model, RANKS, example_inputs=torch.zeros(2, WIDTH, dtype=torch.bfloat16))
    sharded.save_checkpoint(place / "safetensors", format="huggingface")
    sharded.save_checkpoint(place / "DCP")
    loads = {}
    for name in ("safetensors", "DCP"):
        for memory, new in (("a model on the meta device", True), ("weights that are there", False)):
            for end, digests in ways:
                loads[f"{name}, {memory}{end}"] = Load(sharded, place / name, digests, new)
        for end, digests in ways:
            loads[name + COLD + end] = Load(sharded, place / name, digests, new=True, cold=True)
    times = interleaved(loads, rounds, before=dist.barrier)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for p in sharded.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    sharded.zero_grad()
    sharded.save_checkpoint(place / "DCP", optimizer=optimizer)
    loads = {f"DCP, with momenta{end}": Load(sharded, place / "DCP", digests, True, optimizer) for end, digests in ways}
    times |= interleaved(loads, rounds, before=dist.barrier)
    return {name: each.wall if COLD in name else each.cpu for name, each in times.items()}


def run(rounds: int) -> dict[str, Record]:
    """By load: medians over the rounds, of the seconds of both ranks and of their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        everyone = on_ranks(functools.partial(measured, rounds, folder), RANKS)
    sums: dict[str, list[float]] = {}
    for name in everyone[0]:
        sums[name] = [sum(each) for each in zip(*(own[name] for own in everyone), strict=True)]
    out: dict[str, Record] = {}
    for name in sums:
        if not name.endswith(WITHOUT):
            checked, plain = sums[name], sums[name + WITHOUT]
            out[name] = {
                "with_s": statistics.median(checked),
                "without_s": statistics.median(plain),
                "least_s": min(checked) - min(plain),
                "ratio": ratio(checked, plain),
            }
    return out


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    rows = [
        [name, f"{r['without_s']:.2f}", f"{r['with_s']:.2f}", f"{r['ratio']:.3f}", f"{r['least_s']:.3f}"]
        for name, r in record["rows"].items()
    ]
    head = ["loaded", "without, s", "with, s", "ratio", "least of one less least of the other, s"]
    return f"""\
`{record["command"]}`: seconds of {RANKS} gloo ranks of one thread each, together, which load a stack of layers in the
shapes of an 8B Llama's, 0.9 GB in bfloat16; with the [digests](checkpoints.md#digests) that were saved, and as if there
were none. CPU seconds from files in the page cache, where a load is little but a copy in memory, and seconds by the
clock from files that the page cache has dropped. Medians over {record["rounds"]} rounds, in which all take turns.
{record["cores"]} cores of {record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {record["date"]},
load average {record["load_before"]} before.

{table(head, rows)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command("digests", HEADING, run, page, ROUNDS, __doc__, arguments)


if __name__ == "__main__":
    main()
