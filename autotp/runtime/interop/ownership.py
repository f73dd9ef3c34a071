"""Tensors of a sharded module told from other DTensors, and the steps of optimizers that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

INSTEAD = (
    "Save it with sharded.save_checkpoint(folder, optimizer=optimizer), or with torch.distributed.checkpoint, and load "
    "it likewise; both are for any number of ranks."
)
_groups: dict[str, str] = {}  # groups over which sharded modules lie, and those of all axes with them, by name
_steps: list[Any] = []  # optimizers whose steps are under way, one within another


def know(group: str, every: str) -> None:
    """Take DTensors over the group of this name, or a mesh with it, for a sharded module's; `every` is of all axes."""
    _groups[group] = every


def wide_group(groups: Sequence[str], which: Sequence[str]) -> str:
    """Return the group, of a mesh over these, whose ranks communicate over `which`; "" where none is ours."""
    own = next((g for g in groups if g in _groups), "")
    return own if not own or set(which) <= {own} else _groups[own]


def ours(value: Any) -> bool:
    """Return whether a value is a DTensor over the ranks of a sharded module."""
    if not isinstance(value, DTensor):
        return False
    mesh = value.device_mesh
    return any(mesh.get_group(i).group_name in _groups for i in range(mesh.ndim))


def in_parts(value: DTensor) -> bool:
    """Return whether a rank holds less than the value: a slice of it, or a summand."""
    return any(
        n > 1 and not isinstance(p, Replicate) for n, p in zip(value.device_mesh.shape, value.placements, strict=True)
    )


def of_another_rank(value: Any) -> bool:
    """Return whether a DTensor holds a part that is not this rank's: another one pickled it.

    Its mesh comes with it, and in that the place of the rank that wrote it.
    """
    if not isinstance(value, DTensor) or not in_parts(value):
        return False
    mesh: Any = value.device_mesh
    return (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist() != list(mesh.get_coordinate() or ())


def begin_step(optimizer: Any) -> None:
    """Note that all ranks are in a step of this optimizer from now on."""
    _steps.append(optimizer)


def end_step() -> None:
    """Note that the innermost step is done."""
    if _steps:
        _steps.pop()


def stepping() -> bool:
    """Return whether all ranks are in the step of an optimizer."""
    return bool(_steps)


def forget_steps() -> None:
    """Note that no step is under way: one that failed has no end."""
    _steps.clear()


@contextlib.contextmanager
def outside_of_steps() -> Iterator[None]:
    """Run what a step calls that is not its own, such as a closure; where that fails the step has ended."""
    steps = [*_steps]
    _steps.clear()
    yield
    _steps[:] = steps
