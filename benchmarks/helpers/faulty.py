"""Ranks that train, one of which does something wrong at some place of some step; what each of them then got."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp

STEPS, BATCH, WIDTH = 6, 4, 8
RANKS = 2
ENDS = ("kill -9", "os._exit", "exception", "MemoryError", "KeyboardInterrupt")
PAUSES = {"2 s slower": 2.0, "SIGSTOP 2 s": 2.0, "SIGSTOP 20 s": 20.0}
PARTS = (
    "step left out", "backward left out", "update left out", "other shape", "train()", "autocast", "frozen", "seed",
)  # fmt: skip
KINDS = (*ENDS, *PAUSES, *PARTS)
PLACES = ("before the forward", "in the forward", "before the backward", "in the backward", "before the update")


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong, in which step, and, for those that can happen anywhere, at which place of it."""

    kind: str
    rank: int
    step: int
    place: str


class Net(nn.Module):
    """Split in two, with a mask that all ranks must draw alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.tanh(self.up(x))))


def happens(fault: Fault, tell: Callable[[str], None]) -> None:
    """The fault of a kind that can happen anywhere."""
    tell(fault.kind)
    if fault.kind == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "os._exit":
        os._exit(3)
    elif fault.kind.startswith("SIGSTOP"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind in PAUSES:
        time.sleep(PAUSES[fault.kind])
    else:
        raise {"exception": ValueError, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}[fault.kind]


def train(model: Any, fault: Fault | None, tell: Callable[[str], None], losses: list[float]) -> None:
    """The steps, with the fault in one of them; losses as they come."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def at(step: int, place: str) -> None:
        if fault is not None and (fault.step, fault.place) == (step, place) and fault.kind not in PARTS:
            happens(fault, tell)

    now = [0]
    handles = [
        model.down.register_forward_pre_hook(lambda *_: at(now[0], "in the forward")),
        model.down.weight.register_hook(lambda _: at(now[0], "in the backward")),
    ]
    for step in range(STEPS):
        now[0] = step
        what = fault.kind if fault is not None and fault.step == step and fault.kind in PARTS else ""
        if what:
            tell(what)
        if what != "step left out":
            losses.append(one_step(model, inputs[step], optimizer, what, lambda place, step=step: at(step, place)))
    for handle in handles:
        handle.remove()


def one_step(model: Any, x: Tensor, optimizer: Any, what: str, at: Callable[[str], None]) -> float:
    """A step, in which something may be otherwise."""
    model.train(what != "train()")
    model.up.bias.requires_grad_(what != "frozen")
    if what == "seed":
        torch.rand(3)
    at("before the forward")
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        loss = model(x[: BATCH // 2] if what == "other shape" else x).square().mean()
    at("before the backward")
    if what != "backward left out":
        loss.backward()
    at("before the update")
    if what != "update left out":
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def made() -> Net:
    """The model, the same at every call."""
    torch.manual_seed(0)
    return Net().double().train()


def warmed(sharded: Any) -> None:
    """Every kind of call once, so that none is new to a rank when it makes it by mistake."""
    x = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    for mode in (False, True):
        sharded.train(mode)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                sharded(x)
                sharded(x[: BATCH // 2])


def work(rank: int, fault: Fault, folder: str, limit: float, pipe: Connection) -> None:
    """One rank; tells the fault when it happens, and what it got in the end: losses, and the error's class and text."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store: Any = dist.FileStore(str(Path(folder, "store")), RANKS)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    sharded = autotp.compile(made(), example_inputs=torch.zeros(BATCH, WIDTH, dtype=torch.float64), random="torch")
    if fault.kind in PARTS:
        warmed(sharded)
    dist.barrier()
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=limit))
    torch.manual_seed(2)
    losses: list[float] = []
    mine = fault if fault.rank == rank else None
    try:
        train(sharded, mine, lambda kind: pipe.send(("fault", kind, time.time())), losses)
        found = "", ""
    except BaseException as error:
        found = type(error).__name__ if not isinstance(error, autotp.AutoTPError) else "AutoTPError", str(error)
    pipe.send(("end", (losses, *found), time.time()))


def expected(fault: Fault) -> list[float]:
    """The losses of the model itself; it draws what rank 0 does."""
    model, losses = made(), []
    torch.manual_seed(2)
    train(model, fault if (fault.kind, fault.rank) == ("seed", 0) else None, lambda kind: None, losses)
    return losses
