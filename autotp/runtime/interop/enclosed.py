"""A sharded module inside a larger one: what `load_state_dict` of that one, or of a single part, does here.

`nn.Module.load_state_dict` copies by the names and shapes of what a module holds. Here the names and shapes are the
original's, so each module first puts what it holds in the place of what was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.runtime import state
from autotp.runtime.shard_state import ShardState
from autotp.runtime.storage import Storage, laid_like


def load_by_original(shards: ShardState) -> None:
    """Let every module take the original's whole tensors, and those of its `state_dict`, when it is loaded alone."""
    for part in dict.fromkeys(shards.parts.values()):
        if part._storages:
            part.register_load_state_dict_pre_hook(partial(_translate, part._storages))  # type: ignore[arg-type]


def _translate(
    storages: Mapping[str, Storage], module: nn.Module, states: dict[str, Any], prefix: str,
    metadata: Any, strict: bool, missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Put what a state dict has for a whole parameter in the form that the module holds: a hook before torch loads.

    Args:
        storages: by the parameter's own name in the module, how a rank holds it.
        module: whose parameters torch is about to load.
        states: the state dict, changed in place; its keys start with `prefix`.
        metadata, strict, unexpected: as torch gives them; not read.
        missing, errors: what torch raises about afterwards.
    """
    for leaf, storage in storages.items():
        names, key = storage.names(leaf), prefix + leaf
        pieces = [p for p in map(module._parameters.get, names) if p is not None]
        if len(pieces) < len(names):
            continue  # it was replaced by something of the user's
        own = [prefix + n for n in names]
        value = states.get(key)
        if key not in states:
            # A state dict of this module itself has the pieces by name, and torch loads those as they are. Without
            # either torch would call each piece missing: the user knows the whole.
            if len(names) > 1 and not any(n in states for n in own):
                missing.append(key)
                states.update(zip(own, pieces, strict=True))  # it stays as it is
        elif isinstance(value, Tensor) and tuple(value.shape) == storage.shape:
            # Parameters on the meta device get memory when the sharded module loads by itself.
            if pieces[0].is_meta:
                errors.append(f"{key} is on the meta device: load the sharded module by a call of its own.")
            states.pop(key)
            states.update(zip(own, _cut(storage, pieces, value), strict=True))
        elif len(names) > 1 or not isinstance(value, Tensor):
            # Of one piece torch says itself that the shape is another.
            states.pop(key)
            states.update(zip(own, pieces, strict=True))
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            errors.append(f"size mismatch for {key}: it is {storage.shape}, and {shape} was given.")


def _cut(storage: Storage, pieces: list[nn.Parameter], value: Tensor) -> list[Tensor]:
    """A whole tensor, or a DTensor of it, in the pieces that are held."""
    if isinstance(value, DTensor):
        if len(pieces) == 1 and pieces[0].shape == value.shape and state.same_layout(pieces[0], value):
            return [value]
        value = value.full_tensor()
    cut = storage.cut(value.to(pieces[0].dtype))
    return [laid_like(old, new, old.device) for old, new in zip(pieces, cut, strict=True)]
