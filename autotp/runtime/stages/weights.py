"""Weights of which a rank holds those of its own stages: drawn as those of the whole model, and kept in their types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotp.capture.copies import copied
from autotp.errors import StateError
from autotp.runtime.interop.tool_refusals import drawing_all


def refuse_types(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion to another type, for stages send each other values of those that they were made for.

    Args:
        module: the sharded module. fn: of each tensor.

    Raises:
        StateError: it says what to convert instead.
    """
    for dtype in {p.dtype for p in module.parameters()}:
        to = fn(torch.empty(0, dtype=dtype, device=module._shards.device)).dtype
        if to != dtype:
            raise StateError(f"the stages were made for {dtype}: convert the model to {to}, and make them of that.")


def applied(module: Any, fn: Callable[[nn.Module], Any]) -> Any:
    """Apply a function as on the whole model: what modules of other stages draw is drawn here too, and dropped.

    So each block gets numbers of its own, and a tied weight the same ones on every stage that holds it.

    Args:
        module: the sharded module, which is returned. fn: of each of its modules.
    """
    shards = module._shards
    # Under each of its names: a tied head is a module too.
    own = _homes(name for name in shards.aliases if name not in shards.elsewhere)
    absent = _homes(shards.elsewhere) - own

    def visit(original: nn.Module, path: str) -> None:
        if path in absent:
            copied(original, partial(_memory, device=shards.device)).apply(fn)
            return
        for name, child in original.named_children():
            visit(child, f"{path}.{name}" if path else name)
        fn(shards.parts[path])

    with drawing_all():
        visit(shards.bare, "")
    return module


def _homes(names: Iterable[str]) -> set[str]:
    """The paths of the modules that hold tensors of these names, and of those around them."""
    homes = {""}
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in homes:
            homes.add(path)
            path = path.rpartition(".")[0]
    return homes


def _memory(like: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return nn.Parameter(empty, like.requires_grad) if isinstance(like, nn.Parameter) else empty
