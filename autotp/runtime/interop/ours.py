"""Which DTensors are of a sharded module: what is put right for those is left to torch for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

_groups: dict[str, str] = {}  # groups over which sharded modules lie, and those of all axes with them, by name


def know(group: str, every: str) -> None:
    """From now on DTensors over the group of this name, or a mesh with it, are ours; `every` is of all axes."""
    _groups[group] = every


def wide_group(groups: Sequence[str], which: Sequence[str]) -> str:
    """Of a mesh over these groups, the one that has the ranks that communicate over `which`; "" where none is ours."""
    own = next((g for g in groups if g in _groups), "")
    return own if not own or set(which) <= {own} else _groups[own]


def ours(value: Any) -> bool:
    """Whether a value is a DTensor over the ranks of a sharded module."""
    if not isinstance(value, DTensor):
        return False
    mesh = value.device_mesh
    return any(mesh.get_group(i).group_name in _groups for i in range(mesh.ndim))
