"""Parameters, buffers and state dicts of a sharded module, under the original's names."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.comm.ranks import Facts
from autotp.comm.virtual import values_of
from autotp.errors import StateError
from autotp.inputs import Inputs, Leaves
from autotp.ir.graph import NamedTensors
from autotp.ir.layouts import I, Layouts, Shard
from autotp.runtime.interop import dtensor_operators, ownership

from . import data_parallel
from .part import part_of
from .storage import Box, ShardState, Storage
from .weight_reads import Slices


def populate(shards: ShardState, root: nn.Module, model: nn.Module, placements: Layouts) -> None:
    """Build the tree of parts below `root` and give every part its shards and buffers.

    Args:
        shards: takes the parts and what they hold. root: the sharded module. model: the original, with its weights.
        placements: layouts of its parameters by name.
    """
    # A plain process holds no DTensors, and torch's own operators and redistribution stay as they are.
    if shards.ranks.mesh is not None:
        dtensor_operators.install()
        ownership.know(shards.ranks)
    # By identity, so that what is shared stays shared: the tied head of GPT-2 is its embedding, and a copy of it would
    # be trained separately.
    parts = {id(model): root}
    _place_modules(shards, root, model, parts)
    _place_parameters(shards, model, placements, parts)
    _place_buffers(shards, model, placements, parts)


def _place_modules(shards: ShardState, root: nn.Module, model: nn.Module, parts: dict[int, Any]) -> None:
    """Make a part for each module of the model, in the same places; `parts`, by identity of the original, grows."""
    # A module that stands in two places, as a tied head does, is one part in two places.
    for path, module in model.named_modules(remove_duplicate=False):
        shards.parts[path] = parts.setdefault(id(module), root if not path else part_of(module))
        if path:
            owner, _, leaf = path.rpartition(".")
            shards.parts[owner].add_module(leaf, shards.parts[path])


def _place_parameters(shards: ShardState, model: nn.Module, placements: Layouts, parts: dict[int, Any]) -> None:
    """Put the pieces of each parameter in the parts that stand for the modules that have it; `parts` grows."""
    for path, module in model.named_modules(remove_duplicate=False):
        part: Any = shards.parts[path]
        for leaf, parameter in module._parameters.items():
            name = f"{path}.{leaf}" if path else leaf
            # A forward reads those that are None too, such as the bias of Linear(bias=False). The plan has a tied
            # parameter under its first name alone.
            if parameter is None or (first := shards.aliases[name]) in shards.elsewhere:
                part.register_parameter(leaf, None)
                continue
            storage = shards.storage(parameter.shape, placements.get(first, I), shards.axis.owners(first))
            storage = part._storages[leaf] = shards.storages.setdefault(first, storage)
            # Tied parameters are cut once, so that they stay one tensor and train together.
            if id(parameter) not in parts:
                cut = _cut(shards, storage, parameter)
                parts[id(parameter)] = [nn.Parameter(t, parameter.requires_grad) for t in cut]
            # A fused weight has several pieces: DTensor cannot say that q, k and v in it are split each by itself.
            for n, p in zip(storage.names(leaf), parts[id(parameter)], strict=True):
                part.register_parameter(n, p)


def _place_buffers(shards: ShardState, model: nn.Module, placements: Layouts, parts: dict[int, Any]) -> None:
    """Put this rank's copy of each buffer in the parts of the modules that have it; `parts` grows."""
    # Buffers are whole on every rank. `named_buffers` leaves out those that are None, which a forward asks for.
    for path, module in model.named_modules(remove_duplicate=False):
        part = shards.parts[path]
        for leaf, buffer in module._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            buffer = None if shards.aliases.get(name) in shards.elsewhere else buffer
            if buffer is not None and id(buffer) not in parts:
                # On the meta device a rotary table has no values, and no checkpoint holds them.
                value = fresh_buffer(model, path, leaf) if buffer.is_meta else buffer.detach()
                parts[id(buffer)] = _own_buffer(shards, name, value, placements)
            # As persistent as the original's: else the state dict has a name that the original does not load.
            persistent = leaf not in module._non_persistent_buffers_set
            part.register_buffer(leaf, parts.get(id(buffer)), persistent=persistent)
            if buffer is not None:
                shards.holders.setdefault(shards.aliases[name], []).append((part, leaf))


def _own_buffer(shards: ShardState, name: str, whole: Tensor, placements: Layouts) -> Tensor:
    """Return what this rank holds of a buffer: all of it, or where the plan splits it its part."""
    first = shards.aliases[name]
    if not isinstance(placements.get(first), Shard):
        return whole if whole.is_meta else whole.to(shards.device, copy=True)
    shards.tables[first] = shards.storage(whole.shape, placements[first])
    return _cut(shards, shards.tables[first], whole)[0]


def _cut(shards: ShardState, storage: Storage, full: Tensor) -> list[Tensor]:
    """Return this rank's shards of a whole parameter."""
    return storage.shard(full, shards.ranks, torch.device("meta") if full.is_meta else shards.device)


def dealt(shards: ShardState, inputs: Inputs) -> tuple[Inputs, bool]:
    """Return the inputs that this rank computes, and whether those that it is given are whole sequences over cp."""
    parts = shards.ranks.along("cp")
    return inputs.own_part(parts.rank, parts.tp) if parts.tp > 1 else (inputs, False)


def pieces(shards: ShardState, name: str) -> list[Any]:
    """Return the tensors that hold the original's parameter or buffer `name`."""
    part, leaves = shards.place_of(name)
    return [getattr(part, leaf) for leaf in leaves]


def parameters_of(shards: ShardState) -> Iterator[tuple[str, Storage, list[Any]]]:
    """Iterate over the parameters: the original's name, how it is held, and the tensors that hold it."""
    for name, storage in shards.storages.items():
        yield name, storage, pieces(shards, name)


def whole(shards: ShardState, name: str, live: bool = False) -> Tensor:
    """Return the original's parameter or buffer `name`, whole. A collective call.

    Args:
        shards: of the module. name: the tensor's first name.
        live: give what is whole on the rank as the module's own tensor, in place of a copy.
    """
    parts = [p.detach() for p in pieces(shards, name)]
    value = shards.storage_of(name).full(parts)
    return value if live else _unaliased(value, parts)


def boxes(shards: ShardState, name: str) -> list[Box]:
    """Return the blocks of the original's parameter or buffer `name` that this rank holds."""
    return shards.storage_of(name).boxes(pieces(shards, name))


def full_state(shards: ShardState, live: bool) -> NamedTensors:
    """Return parameters and persistent buffers, whole, in the order of the original's own state dict.

    Args:
        shards: of the module. live: as `whole` has it.
    """
    refuse_meta(shards)
    wholes = {first: whole(shards, first, live) for first in first_names(shards)}
    return {name: wholes[first] for name, first in named_tensors(shards)}


def _unaliased(value: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """Return the value, copied where its memory is that of a part: a later step, or clipping, would write to it."""
    addresses = [compat.part_of(x).untyped_storage().data_ptr() for x in (value, *parts)]
    return value.clone() if addresses[0] in addresses[1:] else value


def sharded_state(shards: ShardState, prefix: str) -> NamedTensors:
    """Return DTensors under the original's names, whole tensors where pieces hold a parameter."""
    shards.show_own()  # torch frees what it has gathered for a forward, whoever holds it
    out = {}
    for name, first in named_tensors(shards):
        parts, storage = [p.detach() for p in pieces(shards, first)], shards.storage_of(first)
        plain = len(parts) == 1 and tuple(parts[0].shape) == storage.shape
        out[prefix + name] = parts[0] if plain else storage.full(parts)
    return out


def named_tensors(shards: ShardState, everywhere: bool = False) -> list[tuple[str, str]]:
    """Return names in the original's state dict, with the tensor's first name: of this rank's stages, or of all."""
    state = shards.bare.state_dict()
    pairs = [(name, shards.aliases.get(name, name)) for name, x in state.items() if isinstance(x, Tensor)]
    return [(name, first) for name, first in pairs if everywhere or first not in shards.elsewhere]


def first_names(shards: ShardState) -> list[str]:
    """Return the first names of what this rank's stages hold of the original's state dict: what is tied comes once."""
    return [*dict.fromkeys(first for _, first in named_tensors(shards))]


def write(shards: ShardState, name: str, value: Tensor) -> None:
    """Give a buffer, under all its names, the value that the program computed for it.

    Replaced, not overwritten: the backward may still need the old value.
    """
    with torch.inference_mode(False):
        value = value.clone() if value.is_inference() else value.detach()
    for part, leaf in shards.holders[shards.aliases.get(name, name)]:
        part._buffers[leaf] = value


def full_gradients(shards: ShardState, live: bool) -> NamedTensors:
    """Return whole gradients; None gradients are left out. `live` as `full_state` has it."""
    out = {}
    for name, storage, parts in parameters_of(shards):
        if any(p.grad is not None for p in parts):
            grads = []
            for p in parts:  # a gradient that is not there is zero beside one that is
                grads.append(p.grad if p.grad is not None else torch.zeros_like(p))
            full = storage.full(grads)
            out[name] = full if live else _unaliased(full, grads)
    return out


@torch.no_grad()
def clip(shards: ShardState, max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most this; return the norm before, summed by each virtual rank over its slices.

    Args:
        shards: of the module; without virtual ranks torch's norm is taken.
    """
    host, parameters = shards.host, list(nn.Module.parameters(shards.root))
    if host is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    squares = {}
    for _, storage, parts in parameters_of(shards):
        grads = [p.grad for p in parts]
        if all(g is not None for g in grads):
            values = values_of(Slices(storage, (host,)).read([*map(compat.part_of, grads)]), host.local)
            split = storage.layout.sharded_dim is not None
            squares.setdefault(split, []).append([x.float().square().sum() for x in values])
    total = torch.zeros((), device=shards.device)
    for split, rows in squares.items():
        sums = [torch.stack(column).sum() for column in zip(*rows, strict=True)]
        if split:
            with shards.counter.together("clip_grad_norm_"):
                sums = host.exchange("all_reduce", sums, "sum")
        total = total + sums[0]
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.sqrt())
    return total.sqrt()


def install(shards: ShardState, replacements: Mapping[Tensor, Tensor]) -> None:
    """Put memory in the place of meta tensors, wherever the module holds them; what is tied stays one tensor."""
    parameters = {
        old: nn.Parameter(t, old.requires_grad) for old, t in replacements.items() if isinstance(old, nn.Parameter)
    }
    data_parallel.average_scalars(shards, parameters.values())
    new: Any = {**replacements, **parameters}
    for module in shards.root.modules():
        for table in (module._parameters, module._buffers):
            for leaf, old in table.items():
                if old in new:
                    table[leaf] = new[old]


def dtypes(shards: ShardState) -> dict[str, torch.dtype]:
    """Return present dtype of every parameter and buffer, by its original name."""
    out = {name: parts[0].dtype for name, _, parts in parameters_of(shards)}
    return out | {name: b.dtype for name, b in shards.root.named_buffers()}


def refuse_meta(shards: ShardState) -> None:
    """Refuse a module without weights, which cannot run."""
    empty = [n for n, t in [*shards.root.named_parameters(), *shards.root.named_buffers()] if t.is_meta]
    if empty:
        raise StateError(
            f"{len(empty)} tensors are on the meta device and have no values yet, such as {empty[0]}. "
            "Load weights with load_state_dict; buffers that no state dict holds must be built on a real device."
        )


def fingerprint(value: Tensor) -> str:
    """Return a short hash of a tensor's values."""
    data = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()[:12]


def input_text(flat: Leaves, spec: Any, values: bool) -> Facts:
    """Return what the ranks compare of a call's inputs; of states, which come without values, what they are like."""
    out = {"structure": hashlib.sha256(str(spec).encode()).hexdigest()[:12]}
    for i, v in enumerate(flat):
        out[f"input {i}"] = f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v)
        if values and isinstance(v, Tensor) and not v.is_meta:
            out[f"values of input {i}"] = fingerprint(v)
    return out


def random_state(device: torch.device) -> str:
    """Return a hash of the device's random numbers: ranks that draw different ones compute different things."""
    with compat.without_modes():
        return fingerprint(torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state())


# ---- values of buffers that no state dict holds ----------------------------------------------------------------------


def fresh_buffer(model: nn.Module, path: str, name: str) -> Tensor:
    """Compute a non-persistent meta buffer (rotary frequencies, position ids) by the model's own initialiser.

    That is what building with `torch.device("meta")` relies on everywhere: `_init_weights(module)` of the innermost
    transformers model around the buffer's module, or the module's `reset_parameters()`. It runs on a copy of the
    module without its parameters, whose buffers are filled with a mark first: a buffer that still holds the mark was
    not initialised.

    Args:
        model: the model on the meta device.
        path: of the buffer's module.
        name: of the buffer in that module.

    Returns:
        The buffer on the CPU; the meta tensor itself where nothing initialises it.
    """
    module = model.get_submodule(path)
    buffer: Any = module._buffers[name]
    if name not in module._non_persistent_buffers_set or buffer.dtype == torch.bool:
        return buffer
    steps = path.split(".") if path else []
    around = [model.get_submodule(".".join(steps[:n])) for n in range(len(steps), -1, -1)]
    owner = next((m for m in around if hasattr(m, "_init_weights")), None)
    alone = copy.copy(module)
    alone._modules, alone._parameters = {}, dict.fromkeys(module._parameters)
    alone._buffers = dict.fromkeys(module._buffers)  # those that are not there, and masks, are not asked for
    for leaf, b in module._buffers.items():
        if b is not None and b.dtype != torch.bool:
            alone._buffers[leaf] = torch.full_like(b, _mark(b), device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if owner is not None:
                owner._init_weights(alone)  # type: ignore[operator]
            else:
                alone.reset_parameters()  # type: ignore[operator]
    except Exception:  # a foreign initialiser that needs more than the module's buffers
        return buffer
    value: Any = alone._buffers[name]
    return buffer if bool((value.isnan() | (value == _mark(value))).any()) else value


def _mark(buffer: Tensor) -> float:
    return math.nan if buffer.is_floating_point() or buffer.is_complex() else torch.iinfo(buffer.dtype).min
