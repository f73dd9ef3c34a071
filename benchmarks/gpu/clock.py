"""Seconds of steps on a device, in turns, and ratios of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autotp
from benchmarks.helpers.interleaved import interleaved, ratio
from benchmarks.helpers.isolate import Record
from benchmarks.lists.hand_plans import FakeStore

Step = Callable[[], object]


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(steps: Mapping[str, Step], device: str, rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of each step in each round, on a device that has nothing else to do.

    Args:
        steps: by name; each has run before, so that nothing is compiled now.
        device: "cuda" or "cpu".
        rounds: that count. repeat: calls without waiting that one figure is the mean of.
    """

    def several(step: Step) -> Step:
        def call() -> None:
            for _ in range(repeat):
                step()
            settle(device)

        return call

    steps = {name: several(step) for name, step in steps.items()}
    found = interleaved(steps, rounds, before=lambda: settle(device))
    return {name: [x / repeat for x in times.wall] for name, times in found.items()}


def median_ratio(mine: list[float], base: list[float]) -> float:
    """The median of the ratios in the same round."""
    return ratio(mine, base)


@functools.cache
def cluster(device: str) -> autotp.Cluster:
    """This device as it was measured just now; a CPU's description, for there only the code is tried."""
    if device == "cpu":
        return autotp.Cluster.preset("local")
    return autotp.calibrate(name="this device", dtypes=[torch.float32, torch.bfloat16], show=False)


def compiled(function: Callable[..., Any], backend: str, whole: bool = True) -> Any:
    """A function or module by `torch.compile` for sizes that stay; as it is where the backend is "eager".

    Args:
        function: or a module. backend: of `torch.compile`. whole: without graph breaks.
    """
    return function if backend == "eager" else torch.compile(function, backend=backend, fullgraph=whole, dynamic=False)


@contextmanager
def alone(tp: int) -> Iterator[str]:
    """Rank 0 of `tp` that send nothing, and the group's name; it agrees with itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    assert dist.group.WORLD is not None
    try:
        with mock.patch.object(dist, "all_gather_object", _from_itself):
            yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def _from_itself(everyone: list[Any], own: Any, group: Any = None) -> None:
    everyone[:] = [own] * len(everyone)


def attempted(what: Callable[[], Record]) -> Record:
    """What it gives; or why it failed, as a record with that alone."""
    try:
        return what()
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
