"""Parameters, buffers and state dicts of a sharded module, under the original's names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import StateError
from .layouts import I, Layout
from .ranks import Ranks
from .storage import Storage
from .tree import Part

if TYPE_CHECKING:
    from .module import ShardedModule, Source


def populate(root: ShardedModule, model: nn.Module, placements: Mapping[str, Layout], source: Source) -> None:
    """Build the tree of parts and give every part its shards and buffers."""
    parts: dict[int, nn.Module] = {id(model): root}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            owner, _, leaf = name.rpartition(".")
            part = parts.setdefault(id(module), _part(module))
            root.get_submodule(owner).add_module(leaf, part)
    made: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        first = source.aliases[name]
        storage = root._storages.setdefault(first, Storage(tuple(parameter.shape), placements.get(first, I), source.tp))
        if id(parameter) not in made:
            made[id(parameter)] = _held(parameter, storage, source.ranks)
        for n, p in zip(storage.names(leaf), made[id(parameter)], strict=True):
            root.get_submodule(owner).register_parameter(n, p)
    device = source.ranks.device if source.ranks is not None else torch.device("cpu")
    for module in model.modules():
        part = parts[id(module)]
        for leaf, buffer in module._buffers.items():
            moved = buffer if buffer is None or buffer.is_meta else buffer.detach().to(device, copy=True)
            part.register_buffer(leaf, moved, persistent=leaf not in module._non_persistent_buffers_set)


def _part(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).__module__.startswith("torch."):
        part = type(module)()
    else:
        part = Part(type(module).__name__)
    part.training = module.training
    return part


def _held(parameter: nn.Parameter, storage: Storage, ranks: Ranks | None) -> list[nn.Parameter]:
    if ranks is None:  # one plain process: nothing is split, nothing is copied
        return [nn.Parameter(t, parameter.requires_grad) for t in storage.cut(parameter.detach())]
    device = torch.device("meta") if parameter.is_meta else ranks.device
    shards = storage.shard(parameter, ranks.mesh, ranks.rank, device)
    return [nn.Parameter(s, parameter.requires_grad) for s in shards]


def pieces(root: ShardedModule, name: str) -> list[nn.Parameter]:
    """The parameters that hold the original's parameter `name`."""
    owner, _, leaf = name.rpartition(".")
    module = root.get_submodule(owner)
    return [getattr(module, n) for n in root._storages[name].names(leaf)]


def full_state(root: ShardedModule, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Parameters and persistent buffers, whole, in the order of the original's own state dict."""
    whole = {name: storage.full([of(p) for p in pieces(root, name)]) for name, storage in root.storages()}
    return {name: whole[first] if first in whole else _buffer(root, name) for name, first in _names(root)}


def sharded_state(root: ShardedModule, prefix: str) -> dict[str, Tensor]:
    """DTensors under the original's names, whole tensors where pieces hold a parameter."""
    out = {}
    for name, first in _names(root):
        storage = root._storages.get(first)
        if storage is None:
            out[prefix + name] = _buffer(root, name)
            continue
        held = [p.detach() for p in pieces(root, first)]
        plain = len(held) == 1 and tuple(held[0].shape) == storage.shape
        out[prefix + name] = held[0] if plain else storage.full(held)
    return out


def _names(root: ShardedModule) -> list[tuple[str, str]]:
    """(name in the original's state dict, first name of the same tensor)."""
    return [(name, root._source.aliases.get(name, name)) for name in root._source.bare.state_dict()]


def _buffer(root: ShardedModule, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(root.get_submodule(owner), leaf)


def full_gradients(root: ShardedModule) -> dict[str, Tensor]:
    """Whole gradients; None gradients are left out."""
    out = {}
    for name, storage in root.storages():
        held = pieces(root, name)
        if any(p.grad is not None for p in held):
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
            out[name] = storage.full(grads)
    return out


def load(root: ShardedModule, given: Mapping[str, Any], strict: bool) -> Any:
    """Check all of a state dict, then load all of it."""
    names = dict(_names(root))
    missing = [n for n in names if n not in given]
    if missing:  # a tied parameter may come under any of its names
        have = {names.get(n, n) for n in given}
        missing = [n for n in missing if names[n] not in have]
    unexpected = [n for n in given if n not in names]
    wrong = []
    for name, first in names.items():
        storage = root._storages.get(first)
        shape = storage.shape if storage is not None else tuple(_buffer(root, name).shape)
        if name in given and tuple(given[name].shape) != shape:
            wrong.append(f"{name} is {tuple(given[name].shape)}, the model has {shape}")
    if wrong or (strict and (missing or unexpected)):
        raise StateError(
            "the state dict does not fit the model, and nothing was loaded.\n"
            + "".join(f"  {what}: {', '.join(which)}\n" for what, which in
                      (("missing", missing), ("unknown", unexpected), ("other shape", wrong)) if which)
            + "Give the original model's full state dict; strict=False allows missing and unknown names."
        )  # fmt: skip
    for name, first in names.items():
        if name in given:
            _load_one(root, name, first, given[name])
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _load_one(root: ShardedModule, name: str, first: str, value: Tensor) -> None:
    storage, ranks = root._storages.get(first), root._ranks
    value = value.full_tensor() if isinstance(value, DTensor) else value
    with torch.no_grad():
        if storage is None:
            _fill(_buffer(root, name), value, root, name)
            return
        held = pieces(root, first)
        dtype = held[0].dtype
        if ranks is None:
            parts = storage.cut(value.detach().to(dtype))
        else:
            parts = storage.shard(value.detach().to(dtype), ranks.mesh, ranks.rank, ranks.device)
        for old, new in zip(held, parts, strict=True):
            if old.is_meta:
                _replace(root, old, nn.Parameter(new, old.requires_grad))
            else:
                old.copy_(new)


def _fill(buffer: Tensor, value: Tensor, root: ShardedModule, name: str) -> None:
    if buffer.is_meta:
        owner, _, leaf = name.rpartition(".")
        root.get_submodule(owner)._buffers[leaf] = value.detach().clone()
    else:
        buffer.copy_(value)


def _replace(root: ShardedModule, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in root.modules():
        for leaf, p in list(module._parameters.items()):
            if p is old:
                module._parameters[leaf] = new


def dtypes(root: ShardedModule) -> dict[str, torch.dtype]:
    """Present dtype of every parameter and buffer, by its original name."""
    out = {name: pieces(root, name)[0].dtype for name, _ in root.storages()}
    return out | {name: b.dtype for name, b in root.named_buffers()}


def refuse_meta(root: ShardedModule) -> None:
    """A module without weights cannot run."""
    empty = [n for n, t in [*root.named_parameters(), *root.named_buffers()] if t.is_meta]
    if empty:
        raise StateError(
            f"{len(empty)} tensors are on the meta device and have no values yet, such as {empty[0]}. "
            "Load weights with load_state_dict; buffers that no state dict holds must be built on a real device."
        )


def fingerprint(value: Tensor) -> str:
    """A short hash of a tensor's values."""
    data = value.detach().to("cpu").contiguous().flatten().view(torch.uint8) if value.numel() else value
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
