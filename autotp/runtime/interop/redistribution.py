"""Collectives that torch begins for DTensors of a sharded module: `full_tensor()`, clipping, norms as numbers.

They are begun once all ranks are at the same one, as forwards and backwards are. Within an optimizer's step they are
not compared again: all ranks are in that step (`autotp.runtime.updates`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.comm.lockstep import lost, meet_in, whole_backward

from .ours import wide_group
from .stepping import stepping


@functools.cache
def install() -> None:
    """Compare these collectives, and name the rank where one fails. Once per process."""
    compat.around_redistribution(_around)
    compat.around_backward(whole_backward)


def _around(run: Callable[[], Tensor], local: Any, source: Any, target: Any) -> Tensor:
    group = "" if torch.compiler.is_compiling() or type(local) not in (Tensor, nn.Parameter) else _group(source, target)
    if not group:
        return run()
    if threading.current_thread() is threading.main_thread() and not stepping():
        lies = [", ".join(map(str, spec.placements)) for spec in (source, target)]
        meet_in(group, f"collective of torch, {tuple(source.shape)} from {lies[0]} to {lies[1]}")
    try:
        return run()
    except RuntimeError as error:
        lost(error, group)
        raise


def _group(source: Any, target: Any) -> str:
    """The group whose ranks communicate; "" where nobody does, or the ranks of no sharded module."""
    mesh, pairs = source.mesh, list(zip(source.placements, target.placements, strict=True))
    dims = [i for i, (a, b) in enumerate(pairs) if a != b and not a.is_replicate() and mesh.size(i) > 1]
    names = [mesh.get_group(i).group_name for i in dims]
    if not names:
        return ""
    return wide_group([mesh.get_group(i).group_name for i in range(mesh.ndim)], names)
