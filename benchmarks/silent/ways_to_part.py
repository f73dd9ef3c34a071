"""The ways to part: what one rank does otherwise, before a way in or by a callback amid it, and how that is undone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .context import Context

LATE, STOPPED, GONE = 2.0, 3.0, 12.0  # seconds
SHORT = 4.0  # of the time-out of the process group, where a rank stays away for longer
ERRORS: dict[str, type[BaseException]] = {
    "ValueError": ValueError, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt,
}  # fmt: skip
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(1.5), ".data": lambda weight: weight.data.mul_(1.5),
    "its part": lambda weight: weight.to_local().mul_(1.5),
    "set": lambda weight: setattr(weight, "data", weight.data * 1.5),
}  # fmt: skip
BEFORE, AMID = "before", "amid"  # what a variant of an act begins with
OURS = "of the table"  # the text of exceptions that a rank raises of its own accord


@dataclass(frozen=True)
class WayToPart:
    """What one rank does otherwise: is in another state around the way in, or acts before it or by a callback amid it.

    Attributes:
        around: of the context and the variant: the rank is otherwise within it, and is not after it.
        act: what it does at a moment; variants say when.
        variants: forms of it.
        needs: attribute of a way in without which it has no meaning, and `why` not, in words.
        right: whether numbers must come out right, for it has a right meaning. writes: whether weights are others then.
        ends: whether ranks cannot go on together: one is dead, or the group is past its time-out.
        long: whether the rank stays away for longer than the group's time-out.
    """

    around: Callable[[Context, str], contextlib.AbstractContextManager[None]] | None = None
    act: Callable[[str], None] | None = None
    variants: tuple[str, ...] = ("",)
    needs: str = ""
    why: str = ""
    right: bool = False
    writes: bool = False
    ends: bool = False
    long: bool = False

    def begin(self, context: Context, variant: str) -> contextlib.AbstractContextManager[None]:
        """The rank that is otherwise, from now on."""
        if self.act is not None and variant.startswith(BEFORE):
            self.act(variant)
        return self.around(context, variant) if self.around is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _batch(context: Context, variant: str) -> Iterator[None]:
    context.data = 1
    yield
    context.data = 0


@contextlib.contextmanager
def _shape(context: Context, variant: str) -> Iterator[None]:
    usual = context.length
    context.length = 12
    yield
    context.length = usual


@contextlib.contextmanager
def _seed(context: Context, variant: str) -> Iterator[None]:
    torch.manual_seed(1234)
    torch.rand(3)
    yield


@contextlib.contextmanager
def _mode(context: Context, variant: str) -> Iterator[None]:
    module = context.model if variant == "all" else context.layer()
    module.train(not module.training)
    yield
    module.train(not module.training)


@contextlib.contextmanager
def _autocast(context: Context, variant: str) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@contextlib.contextmanager
def _convert(context: Context, variant: str) -> Iterator[None]:
    context.model.float()
    yield


@contextlib.contextmanager
def _rate(context: Context, variant: str) -> Iterator[None]:
    usual = context.rate
    context.rate *= 2
    yield
    context.rate = usual


@contextlib.contextmanager
def _freeze(context: Context, variant: str) -> Iterator[None]:
    weight = weight_of(context, "split")
    trained = weight.requires_grad
    weight.requires_grad_(not trained)
    yield
    weight.requires_grad_(trained)


@contextlib.contextmanager
def _leave_out(context: Context, variant: str) -> Iterator[None]:
    context.left_out = True
    yield
    context.left_out = False


@contextlib.contextmanager
def _hook(context: Context, variant: str) -> Iterator[None]:
    place, does = variant.split()
    module: Any = context.layer()
    module = module.down_proj if place == "within" else module

    def hook(module: Any, inputs: Any, output: Tensor) -> Any:
        if does == "writes":
            output.data.mul_(1.5)
        return output * 1.5 if does == "returns" else None

    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


@contextlib.contextmanager
def _write(context: Context, variant: str) -> Iterator[None]:
    which, how = variant.split(" ", 1)
    weight: Any = weight_of(context, which)
    with torch.no_grad():
        WRITES[how](weight)
    yield


def weight_of(context: Context, which: str) -> Any:
    """A weight that is "whole" on every tp rank, or "split"."""
    for p in context.model.parameters():
        if isinstance(p, DTensor) and isinstance(p.placements[-1], Replicate) == (which == "whole"):
            return p
    raise LookupError(which)


def raise_error(variant: str) -> None:
    """An exception of the rank's own."""
    raise ERRORS[variant.split()[-1]](OURS)


def die(variant: str) -> None:
    """The end of the process."""
    if "exit" in variant:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def be_late(variant: str) -> None:
    """A pause."""
    time.sleep(LATE)


def stop(variant: str) -> None:
    """The process stands still, and is woken by another one."""
    pause = GONE if "long" in variant else STOPPED
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {pause}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


NO_FORWARD: dict[str, Any] = {"needs": "forward", "why": "no batch"}
WAYS_TO_PART: dict[str, WayToPart] = {
    "batch": WayToPart(_batch, **NO_FORWARD),
    "shape": WayToPart(_shape, **NO_FORWARD),
    "option": WayToPart(needs="options", why="no option"),
    "seed": WayToPart(_seed, needs="drawn", why="draws nothing", right=True),
    "mode": WayToPart(_mode, variants=("all", "a layer"), **NO_FORWARD),
    "autocast": WayToPart(_autocast, **NO_FORWARD),
    "dtype": WayToPart(_convert, writes=True),
    "rate": WayToPart(_rate, needs="rate", why="no rate"),
    "frozen": WayToPart(_freeze, needs="gradient", why="no gradient"),
    "left out": WayToPart(_leave_out),
    "exception": WayToPart(
        act=raise_error, variants=tuple(f"{AMID} {name}" for name in ERRORS), needs="at", why="no callback"
    ),
    "threads": WayToPart(),
    "death": WayToPart(act=die, variants=(BEFORE, AMID, f"{AMID}, exit"), ends=True),
    "late": WayToPart(act=be_late, variants=(BEFORE, AMID), right=True),
    "stopped": WayToPart(act=stop, variants=(BEFORE, AMID), right=True),
    "gone for long": WayToPart(act=stop, variants=(f"{BEFORE}, long",), ends=True, long=True),
    "hook that looks": WayToPart(_hook, variants=("block looks", "within looks"), **NO_FORWARD),
    "hook that changes": WayToPart(
        _hook, variants=("block returns", "block writes", "within returns", "within writes"), **NO_FORWARD
    ),
    "weight written": WayToPart(
        _write, variants=tuple(f"{which} {how}" for which in ("whole", "split") for how in WRITES), writes=True
    ),
}  # fmt: skip
