"""Methods of the original's modules that compute with weights in their own ways, and write them: on whole tensors.

PEFT merges an adapter into a weight by a method of the layer. Some are sums and products, which DTensor splits;
others mix weights with tensors that they make, or rearrange them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autotp.comm.lockstep import meet_in
from autotp.runtime.storage import laid_like

from .ours import ours

WRITERS = ("merge", "unmerge")


def on_whole_weights(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods of a class that its parts run on whole weights. Collective calls."""
    methods = {name: getattr(original, name, None) for name in WRITERS}
    return {name: _run(method) for name, method in methods.items() if callable(method)}


def _run(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _agree(self, f"{method.__name__}({_text((*args, *kwargs.items()))[1:-1]})")
        with whole_weights(self):
            return method(self, *args, **kwargs)

    return run


def _agree(part: Any, call: str) -> None:
    """Make sure that the ranks which a part's weights lie over make the same call of it. A collective call."""
    groups = {
        p.device_mesh.get_group(i).group_name for p in part.parameters() if ours(p) for i in range(p.device_mesh.ndim)
    }
    for group in sorted(groups):
        meet_in(group, f"{call} of {part._watched.path}")


def _text(value: Any) -> str:
    """An argument in words that are the same in every process."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


@contextlib.contextmanager
@torch.no_grad()
def whole_weights(part: nn.Module) -> Iterator[None]:
    """Within this context a part and those in it hold whole parameters; what these are then is kept. Collective."""
    owners: list[Any] = [m for m in part.modules() if getattr(m, "_storages", None)]
    tables = [owner._parameters for owner in owners]
    wholes: dict[int, nn.Parameter] = {}  # by identity of a first piece, so that what is tied stays tied
    for owner, table in zip(owners, tables, strict=True):
        owner._parameters = table | {leaf: _whole(owner, leaf, table, wholes) for leaf in owner._storages}
    try:
        yield
        for owner, table in zip(owners, tables, strict=True):
            for leaf, storage in owner._storages.items():
                names, whole = storage.names(leaf), owner._parameters[leaf].detach()
                for name, new in zip(names, storage.cut(whole), strict=True):
                    table[name].copy_(laid_like(table[name], new, table[name].device))
    finally:
        for owner, table in zip(owners, tables, strict=True):
            owner._parameters = table


def _whole(owner: Any, leaf: str, table: dict[str, Any], wholes: dict[int, nn.Parameter]) -> nn.Parameter:
    """The whole parameter of this name, from its pieces."""
    storage = owner._storages[leaf]
    pieces = [table[name] for name in storage.names(leaf)]
    if id(pieces[0]) not in wholes:
        whole = storage.full([p.detach() for p in pieces]).clone()
        wholes[id(pieces[0])] = nn.Parameter(whole, pieces[0].requires_grad)
    return wholes[id(pieces[0])]
