"""Which DTensors are of a sharded module: what is put right for those is left to torch for all others."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

_groups: set[str] = set()  # names of the groups over which sharded modules lie


def know(group: str) -> None:
    """From now on DTensors over the group of this name, or a mesh with it, are ours."""
    _groups.add(group)


def ours(value: Any) -> bool:
    """Whether a value is a DTensor over the ranks of a sharded module."""
    if not isinstance(value, DTensor):
        return False
    mesh = value.device_mesh
    return any(mesh.get_group(i).group_name in _groups for i in range(mesh.ndim))
