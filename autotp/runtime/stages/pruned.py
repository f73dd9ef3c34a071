"""A model without what this rank does not hold: the same tree of modules, with fewer of them and fewer tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from autotp.capture.capture import aliases


def pruned(model: nn.Module, names: Collection[str], paths: Collection[str]) -> nn.Module:
    """A shallow copy of a model; it shares the tensors that it has, and the model stays as it is.

    Args:
        names: of the parameters and buffers that it has, each under any of its names.
        paths: of the modules that it has beside those that hold something.
    """
    first = aliases(model)
    first_names = {first.get(n, n) for n in names}
    tensors = {n for n, f in first.items() if f in first_names}
    module_paths = {*paths, *(n.rpartition(".")[0] for n in tensors)}
    homes = set(module_paths)
    for path in module_paths:
        homes |= {".".join(path.split(".")[:i]) for i in range(1, path.count(".") + 1)}
    copies: dict[int, nn.Module] = {}

    def part(module: nn.Module, path: str) -> nn.Module:
        if id(module) not in copies:
            new: Any = object.__new__(type(module))
            copies[id(module)] = new
            new.__dict__ = dict(vars(module))
            inside = f"{path}." if path else ""
            for table in ("_parameters", "_buffers"):
                old = vars(module)[table]
                # None, which forwards and descriptions ask for, in the place of what is held elsewhere.
                new.__dict__[table] = dict.fromkeys(old) | {k: t for k, t in old.items() if inside + k in tensors}
            children = {k: m for k, m in module._modules.items() if m is None or inside + k in homes}
            new.__dict__["_modules"] = {k: m and part(m, inside + k) for k, m in children.items()}
        return copies[id(module)]

    return part(model, "")


def unread(model: nn.Module, names: Collection[str]) -> set[str]:
    """First names of the tensors of a model that no stage reads: the first stage holds them, for checkpoints."""
    first = aliases(model)
    return set(first.values()) - {first.get(n, n) for n in names}
