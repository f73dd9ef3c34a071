"""A rank of `benchmarks.outlive`, started by torchrun: it trains, and kills itself or its agent where it is told to."""

import time

BEGAN = time.time()

import json  # noqa: E402
import mmap  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import struct  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import autotp  # noqa: E402
from autotp.runtime.checkpoint import shared_memory  # noqa: E402
from benchmarks.helpers.llama.megatron import Shape, untouched  # noqa: E402

IMPORTED = time.time()
SHAPE = Shape(hidden=96, layers=2, heads=6, kv_heads=3, wide=192, vocabulary=256)  # six heads: four ranks cannot share
VIRTUAL, LENGTH = 12, 64
PHASES = ("forward", "backward", "step", "keep")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, `[2, LENGTH]` each."""
    starts = torch.randint(SHAPE.vocabulary, (2, 1), generator=torch.Generator().manual_seed(step))
    text = (7 * (starts + torch.arange(LENGTH + 1))) % SHAPE.vocabulary
    return text[:, :-1], text[:, 1:]


def trained(**options: Any) -> tuple[Any, Any]:
    """The sharded model, whose losses are the same on any number of ranks, and its optimizer."""
    sharded: Any = autotp.compile(untouched(SHAPE), example_inputs=batch(0)[0], tp_invariant=VIRTUAL, **options)
    return sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-3)


def step(sharded: Any, optimizer: Any, number: int, at: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Do a step, and tell its loss to the bit before the step is kept: who ends right after that does it no more."""
    ids, targets = batch(number)
    at("forward")
    loss = torch.nn.functional.cross_entropy(sharded(ids).flatten(0, 1), targets.flatten())
    at("backward")
    loss.backward()
    tell(float(loss.detach()).hex())
    at("step")
    optimizer.step()
    optimizer.zero_grad()


class Victim:
    """Takes orders to be killed: in a phase of a step, by itself or with its agent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.order, self.copy = folder, dict[str, Any](), shared_memory.copy
        shared_memory.copy = self.copied

    def take(self) -> None:
        """Look for an order that is for this rank."""
        order = self.folder / "order"
        with suppress(FileNotFoundError):  # there is none, or the rank that it is for has taken it
            text = json.loads(order.read_text())
            if text["victim"] % dist.get_world_size() == dist.get_rank():
                order.unlink()
                self.order = text

    def __call__(self, phase: str) -> None:
        """Say that a phase begins: in the one that is ordered this rank ends at a random moment."""
        if self.order.get("phase") == phase:
            threading.Timer(random.uniform(0, 0.05), self.end).start()

    def copied(self, copies: Any) -> Any:
        """Copy, or end in the middle of it."""
        if self.order.get("phase") == "keep":
            self.copy((copies[0][: random.randrange(len(copies[0]) + 1)], copies[1]))
            self.end()
        return self.copy(copies)

    def end(self) -> None:
        """SIGKILL."""
        if self.order["agent"]:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def note(file: Path, values: Mapping[str, Any]) -> None:
    """Add a line to a file."""
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(values) + "\n")


def counter(file: Path) -> mmap.mmap:
    """A number in a file, which is there when this process is not."""
    file.write_bytes(bytes(8))
    with open(file, "r+b") as stream:
        return mmap.mmap(stream.fileno(), 8)


def stops(folder: Path) -> bool:
    """Whether all ranks are to end, as rank 0 sees it."""
    told = torch.tensor(int((folder / "stop").exists()))
    dist.broadcast(told, 0)
    return bool(told)


def main(folder: Path, every: int, redundancy: int) -> None:
    """Train until a file says to stop."""
    torch.set_num_threads(1)
    sharded, optimizer = trained(resume=True)
    victim, done = Victim(folder), counter(folder / f"done-{os.getpid()}")
    with sharded.snapshot(optimizer, every=every, redundancy=redundancy) as kept:
        first, began = kept.step, time.time()

        def tell(loss: str) -> None:
            if dist.get_rank() == 0:
                note(folder / "losses", {"step": kept.step + 1, "loss": loss})

        while not stops(folder):
            if kept.step > first + every:
                victim.take()
            step(sharded, optimizer, kept.step, victim, tell)
            done[:] = struct.pack("q", kept.step)
            if kept.step == first + 1:
                seconds = {"imports": IMPORTED - BEGAN, "ready": began - IMPORTED, "stepped": time.time() - IMPORTED}
                note(folder / "starts", {"pid": os.getpid(), "first": first, "tp": dist.get_world_size(), **seconds})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
