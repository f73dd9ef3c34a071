"""Parameters, buffers and state dicts of a sharded module, under the original's names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.capture.subclasses.weights import plain_state
from autotp.comm.ranks import Ranks, agree, together
from autotp.errors import StateError
from autotp.ir.layouts import I, Layout, Shard
from autotp.runtime.interop import arrays, foreign, operators, redistribution, refusals
from autotp.runtime.interop.ours import know

from . import data_parallel
from .meta import fresh_buffer
from .part import part_of
from .samples import few
from .shard_state import ShardState
from .storage import Storage, laid_like


def populate(shards: ShardState, root: nn.Module, model: nn.Module, placements: Mapping[str, Layout]) -> None:
    """Build the tree of parts below `root` and give every part its shards and buffers.

    Args:
        shards: takes the parts and what they hold. root: the sharded module. model: the original, with its weights.
        placements: layouts of its parameters by name.
    """
    # A plain process holds no DTensors, and torch's own operators and redistribution stay as they are.
    if shards.ranks is not None:
        operators.install()
        arrays.install()
        refusals.install()
        redistribution.install()
        know(shards.ranks.group_name, shards.ranks.planners.group_name)
    # By identity, so that what is shared stays shared: the tied head of GPT-2 is its embedding, and as a copy of it
    # would train apart.
    parts: dict[int, Any] = {id(model): root}
    _place_modules(shards, root, model, parts)
    _place_parameters(shards, model, placements, parts)
    _place_buffers(shards, model, placements, parts)


def _place_modules(shards: ShardState, root: nn.Module, model: nn.Module, parts: dict[int, Any]) -> None:
    """A part for each module of the model, in the same places; `parts`, by identity of the original, grows."""
    # A module that stands in two places, as a tied head does, is one part in two places.
    for path, module in model.named_modules(remove_duplicate=False):
        shards.parts[path] = parts.setdefault(id(module), root if not path else part_of(module))
        if path:
            owner, _, leaf = path.rpartition(".")
            shards.parts[owner].add_module(leaf, shards.parts[path])


def _place_parameters(
    shards: ShardState, model: nn.Module, placements: Mapping[str, Layout], parts: dict[int, Any]
) -> None:
    """The pieces of each parameter, in the parts that stand for the modules that have it; `parts` grows."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        # The plan has a tied parameter under its first name alone.
        first = shards.aliases[name]
        storage = shards.storages.setdefault(
            first, Storage(tuple(parameter.shape), placements.get(first, I), shards.tp)
        )
        if id(parameter) not in parts:
            parts[id(parameter)] = _pieces_of(shards, parameter, storage)
        # A fused weight has several pieces: DTensor cannot say that q, k and v in it are split each by itself.
        for n, p in zip(storage.names(leaf), parts[id(parameter)], strict=True):
            shards.parts[owner].register_parameter(n, p)
        shards.parts[owner]._storages[leaf] = storage  # type: ignore[index, operator]
    # `named_parameters` leaves out those that are None, such as the bias of Linear(bias=False), which a forward reads.
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                shards.parts[path].register_parameter(leaf, None)


def _place_buffers(
    shards: ShardState, model: nn.Module, placements: Mapping[str, Layout], parts: dict[int, Any]
) -> None:
    """This rank's copy of each buffer, in the parts of the modules that have it; `parts` grows."""
    # Buffers are whole on every rank. `named_buffers` leaves out those that are None, which a forward asks for.
    for path, module in model.named_modules(remove_duplicate=False):
        part = shards.parts[path]
        for leaf, buffer in module._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            if buffer is not None and id(buffer) not in parts:
                # On the meta device a rotary table has no values, and no checkpoint holds them.
                value = fresh_buffer(model, path, leaf) if buffer.is_meta else buffer.detach()
                parts[id(buffer)] = _own_buffer(shards, name, value, placements)
            own = None if buffer is None else parts[id(buffer)]
            # As persistent as the original's: else the state dict has a name that the original does not load.
            part.register_buffer(leaf, own, persistent=leaf not in module._non_persistent_buffers_set)
            if own is not None:
                shards.holders.setdefault(shards.aliases[name], []).append((part, leaf))


def _pieces_of(shards: ShardState, parameter: nn.Parameter, storage: Storage) -> list[nn.Parameter]:
    device = torch.device("meta") if parameter.is_meta else shards.device
    return [nn.Parameter(s, parameter.requires_grad) for s in _cut(storage, parameter, shards.ranks, device)]


def _own_buffer(shards: ShardState, name: str, whole: Tensor, placements: Mapping[str, Layout]) -> Tensor:
    """What this rank holds of a buffer: all of it, or where the plan splits it its part."""
    device, first = torch.device("meta") if whole.is_meta else shards.device, shards.aliases[name]
    if not isinstance(placements.get(first), Shard):
        return whole if whole.is_meta else whole.to(device, copy=True)
    shards.tables[first] = Storage(tuple(whole.shape), placements[first], shards.tp)
    return _cut(shards.tables[first], whole, shards.ranks, device)[0]


def _cut(storage: Storage, full: Tensor, ranks: Ranks | None, device: torch.device) -> Sequence[Tensor]:
    """This rank's shards of a whole parameter; in one plain process the whole pieces."""
    if ranks is None:
        return [t.to(device, copy=True).contiguous() for t in storage.cut(full.detach())]
    return storage.shard(full, ranks.mesh, ranks.rank, device)


def pieces(shards: ShardState, name: str) -> list[nn.Parameter]:
    """The parameters that hold the original's parameter `name`."""
    owner, _, leaf = name.rpartition(".")
    storage = shards.storage_of(name)
    assert storage is not None
    return [getattr(shards.parts[owner], n) for n in storage.names(leaf)]


def full_state(shards: ShardState, live: bool) -> dict[str, Tensor]:
    """Parameters and persistent buffers, whole, in the order of the original's own state dict.

    Args:
        shards: of the module. live: give what is whole on the rank as the module's own tensor, in place of a copy.
    """
    refuse_meta(shards)
    whole: dict[str, Tensor] = {}
    for name, storage in (*shards.storages.items(), *shards.tables.items()):
        parts = [p.detach() for p in pieces(shards, name)]
        whole[name] = storage.full(parts) if live else _apart(storage.full(parts), parts)
    out: dict[str, Tensor] = {}
    for name, first in named_tensors(shards):
        if first not in whole:
            buffer = buffer_of(shards, name)
            whole[first] = buffer if live else buffer.detach().clone()
        out[name] = whole[first]
    return out


def _apart(value: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """The value, copied where its memory is that of a part: a later step, or clipping, would write to it."""
    own = {compat.part_of(part).untyped_storage().data_ptr() for part in parts}
    return value.clone() if compat.part_of(value).untyped_storage().data_ptr() in own else value


def sharded_state(shards: ShardState, prefix: str) -> dict[str, Tensor]:
    """DTensors under the original's names, whole tensors where pieces hold a parameter."""
    out = {}
    for name, first in named_tensors(shards):
        storage = shards.storage_of(first)
        if storage is None:
            out[prefix + name] = buffer_of(shards, name)
            continue
        parts = [p.detach() for p in pieces(shards, first)]
        plain = len(parts) == 1 and tuple(parts[0].shape) == storage.shape
        out[prefix + name] = parts[0] if plain else storage.full(parts)
    return out


def named_tensors(shards: ShardState) -> list[tuple[str, str]]:
    """(name in the original's state dict, first name of the same tensor)."""
    state = shards.bare.state_dict()
    return [(name, shards.aliases.get(name, name)) for name, x in state.items() if isinstance(x, Tensor)]


def buffer_of(shards: ShardState, name: str) -> Tensor:
    """The buffer of this name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(shards.parts[owner], leaf)


def write(shards: ShardState, name: str, value: Tensor) -> None:
    """Give a buffer, under all its names, the value that the program computed for it.

    Replaced, not overwritten: the backward may still need the old value.
    """
    with torch.inference_mode(False):
        value = value.clone() if value.is_inference() else value.detach()
    for part, leaf in shards.holders[shards.aliases.get(name, name)]:
        part._buffers[leaf] = value


def full_gradients(shards: ShardState, live: bool) -> dict[str, Tensor]:
    """Whole gradients; None gradients are left out. `live` as `full_state` has it."""
    out = {}
    for name, storage in shards.storages.items():
        parts = pieces(shards, name)
        if any(p.grad is not None for p in parts):
            grads = []
            for p in parts:  # a gradient that is not there is zero beside one that is
                grads.append(p.grad if p.grad is not None else torch.zeros_like(p))
            out[name] = storage.full(grads) if live else _apart(storage.full(grads), grads)
    return out


def load(shards: ShardState, tensors: Mapping[str, Any], strict: bool) -> Any:
    """Check all of a state dict, also that the ranks have the same one, then load all of it. A collective call."""
    every, tensors = shards.ranks and shards.ranks.planners, plain_state(tensors)
    loaded, missing, unexpected = together(every, "loading a state dict", lambda: _fitting(shards, tensors, strict))
    values = {name: few(tensors[name]) for name in loaded if not isinstance(tensors[name], DTensor)}
    agree(every, "the values of the state dict (a few of each tensor are compared)", values)
    for name, first in loaded.items():
        _load_one(shards, name, first, tensors[name])
    shards.loaded()
    return compat.IncompatibleKeys(missing, unexpected)


def _fitting(
    shards: ShardState, tensors: Mapping[str, Any], strict: bool
) -> tuple[dict[str, str], list[str], list[str]]:
    """Names of tensors to load, with their first names; those that are missing; those that are unknown."""
    if not isinstance(tensors, Mapping):
        raise StateError(f"load_state_dict got {type(tensors).__name__}; give the original model's full state dict.")
    names = dict(named_tensors(shards))
    buffers = {
        name: name for name, _ in shards.root.named_buffers(remove_duplicate=False)
    }  # those not persistent may come too
    have = {names.get(n, n) for n in tensors}  # a tied parameter may come under any of its names
    missing = [n for n, first in names.items() if first not in have]
    unexpected = [n for n in tensors if n not in names and n not in buffers]
    loaded = {name: first for name, first in (buffers | names).items() if name in tensors}
    wrong = [text for name, first in loaded.items() if (text := _odd(shards, name, first, tensors[name]))]
    _refuse_foreign(tensors)
    if wrong or (strict and (missing or unexpected)):
        raise StateError(
            "the state dict does not fit the model, and nothing was loaded.\n"
            + "".join(f"  {what}: {', '.join(which)}\n" for what, which in
                      (("missing", missing), ("unknown", unexpected), ("other shape", wrong)) if which)
            + "Give the original model's full state dict; strict=False allows missing and unknown names."
        )  # fmt: skip
    return loaded, missing, unexpected


def _refuse_foreign(tensors: Mapping[str, Any]) -> None:
    odd = [name for name, value in tensors.items() if foreign.of_another_rank(value)]
    if odd:
        raise StateError(f"{odd[0]} is another rank's part: one rank had pickled it for all. {foreign.INSTEAD}")


def _odd(shards: ShardState, name: str, first: str, value: Any) -> str:
    storage = shards.storage_of(first)
    shape = storage.shape if storage is not None else tuple(buffer_of(shards, name).shape)
    if not isinstance(value, Tensor):
        return f"{name} is {type(value).__name__}, no tensor"
    return "" if tuple(value.shape) == shape else f"{name} is {tuple(value.shape)}, the model has {shape}"


@torch.no_grad()
def _load_one(shards: ShardState, name: str, first: str, value: Tensor) -> None:
    storage = shards.storage_of(first)
    if storage is None:
        own: list[Any] = [buffer_of(shards, name)]
        parts: Sequence[Tensor] = [value]
    else:
        own = pieces(shards, first)
        if isinstance(value, DTensor):
            if len(own) == 1 and same_layout(own[0], value):
                own[0].copy_(value)
                return
            value = value.full_tensor()
        parts = [
            laid_like(old, new, shards.device)
            for old, new in zip(own, storage.cut(value.to(own[0].dtype)), strict=True)
        ]
    for old, new in zip(own, parts, strict=True):
        if old.is_meta:
            install(shards, {old: new.to(shards.device, copy=True)})
        else:
            old.copy_(new)


def same_layout(old: Tensor, new: DTensor) -> bool:
    """Whether what is held lies over the ranks as the other does."""
    return isinstance(old, DTensor) and old.device_mesh == new.device_mesh and old.placements == new.placements


def install(shards: ShardState, replacements: Mapping[Tensor, Tensor]) -> None:
    """Put memory in the place of meta tensors, wherever the module holds them; what is tied stays one tensor."""
    parameters = {
        old: nn.Parameter(t, old.requires_grad) for old, t in replacements.items() if isinstance(old, nn.Parameter)
    }
    data_parallel.average_scalars(shards, list(parameters.values()))
    for module in shards.root.modules():
        for table, new in ((module._parameters, parameters), (module._buffers, replacements)):
            for leaf, old in table.items():
                if old is not None and old in new:
                    table[leaf] = new[old]  # type: ignore[assignment]


def dtypes(shards: ShardState) -> dict[str, torch.dtype]:
    """Present dtype of every parameter and buffer, by its original name."""
    out = {name: pieces(shards, name)[0].dtype for name, _ in shards.storages.items()}
    return out | {name: b.dtype for name, b in shards.root.named_buffers()}


def refuse_meta(shards: ShardState) -> None:
    """A module without weights cannot run."""
    empty = [n for n, t in [*shards.root.named_parameters(), *shards.root.named_buffers()] if t.is_meta]
    if empty:
        raise StateError(
            f"{len(empty)} tensors are on the meta device and have no values yet, such as {empty[0]}. "
            "Load weights with load_state_dict; buffers that no state dict holds must be built on a real device."
        )


def fingerprint(value: Tensor) -> str:
    """A short hash of a tensor's values."""
    data = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()[:12]


def input_text(flat: Sequence[Any], spec: Any, values: bool) -> dict[str, str]:
    """What the ranks compare of a call's inputs; of states, which come without values, what they are like."""
    out = {"structure": hashlib.sha256(str(spec).encode()).hexdigest()[:12]}
    for i, v in enumerate(flat):
        out[f"input {i}"] = f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v)
        if values and isinstance(v, Tensor) and not v.is_meta:
            out[f"values of input {i}"] = fingerprint(v)
    return out


def random_state(device: torch.device) -> str:
    """A hash of the state of the device's random numbers: ranks that draw different ones compute different things."""
    with compat.without_modes():
        return fingerprint(torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state())
