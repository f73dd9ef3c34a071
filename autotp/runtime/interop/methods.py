"""Methods of the original's class that a sharded module and its parts replace; all others they inherit.

Some work on whole weights in the place of what a part holds. `nn.Module.load_state_dict` of a larger module, or of a
single part, copies by the names and shapes of what a module holds; here those are the original's. PEFT merges an
adapter into a weight by a method of the layer. Some are sums and products, which DTensor splits; others mix weights
with tensors that they make, or rearrange them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import StateError
from autotp.ir.graph import Function
from autotp.runtime.storage import ShardState, Storage

UNLOAD = (
    "{name}() takes the adapters out of the model, and the plan, the parameters and the programs are of the model with "
    "them. Merge in place by merge_adapter(), for as long as it serves; or load the original by "
    "model.load_state_dict(sharded.full_state_dict()), call model.{name}(), and give what that returns to "
    "autotp.compile."
)
ADD = (
    "{name}() brings adapters that the plan does not have. Call it on the original model, and give that to "
    "autotp.compile; to go on with saved ones, load them there by PeftModel.from_pretrained(..., is_trainable=True)."
)
SAVE = (
    "{name}() of a part would write what one rank holds. Take sharded.save_pretrained(folder), or "
    "sharded.save_checkpoint(folder, format='huggingface')."
)
BATCHES = (
    "{name}: requests of continuous batching are the whole module's, and this is a part of it. Take "
    "sharded.generate_batch(...) or sharded.init_continuous_batching(...)."
)
# What changes the modules that run, and does a part of that before it meets the first one that it may not; and what
# writes without the other ranks.
REFUSED = {
    "merge_and_unload": UNLOAD, "unload": UNLOAD, "delete_adapter": UNLOAD, "add_adapter": ADD, "load_adapter": ADD,
    "save_pretrained": SAVE,
}  # fmt: skip
# What libraries look for before they use it, and do without where it is not there.
ABSENT = {
    "generate_batch": BATCHES, "init_continuous_batching": BATCHES, "continuous_batching_context_manager": BATCHES,
    "destroy_cached_continuous_batching_manager": BATCHES,
}  # fmt: skip

# Hooks that a trace of the original's modules runs, such as PEFT's adapters by row: they are put on those.
ON_ORIGINAL = ("_enable_peft_forward_hooks",)


class AbsentError(StateError, AttributeError):
    """Error for an attribute that the original has and the sharded module has not; it says what to take instead."""


class Absent:
    """Descriptor in place of a method that is absent, of which `Part.__getattr__` says why."""

    def __get__(self, part: Any, owner: Any = None) -> Any:
        raise AttributeError


def in_place_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return what parts have in place of methods of a class: these refuse, or put hooks where a trace runs them."""
    absent = {n: Absent() for n in ABSENT if hasattr(original, n)}
    hooking = {n: property(attrgetter(f"_watched.module.{n}")) for n in ON_ORIGINAL if hasattr(original, n)}
    return absent | hooking | {n: _refuser(n) for n in REFUSED if callable(getattr(original, n, None))}


def _refuser(name: str) -> Function:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StateError(REFUSED[name].format(name=name))

    return refuse


WRITERS = ("merge", "unmerge")


def load_by_original(shards: ShardState) -> None:
    """Let every module take the original's whole tensors, and those of its `state_dict`, when it is loaded alone."""
    for part in dict.fromkeys(shards.parts.values()):
        storages: Any = part._storages
        if storages:
            part.register_load_state_dict_pre_hook(functools.partial(_translate, storages))


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
        key, names = prefix + leaf, storage.names(leaf)
        keys = [prefix + n for n in names]
        pieces = [p for p in map(module._parameters.get, names) if p is not None]
        if len(pieces) < len(names):
            continue  # it was replaced by something of the user's
        if key in states:
            value: Any = states.pop(key)
            if fits := isinstance(value, Tensor) and tuple(value.shape) == storage.shape:
                # Parameters on the meta device get memory when the sharded module loads by itself.
                late = [f"{key} is on the meta device: load the sharded module by a call of its own."]
                errors += late if pieces[0].is_meta else []
            else:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                errors.append(f"size mismatch for {key}: it is {storage.shape}, and {shape} was given.")
            states.update(zip(keys, storage.laid(value, pieces) if fits else pieces, strict=True))
        elif len(names) > 1 and not any(n in states for n in keys):
            # A state dict of this module itself has the pieces by name, and torch loads those as they are. Without
            # either torch would call each piece missing: the user knows the whole.
            missing.append(key)
            states.update(zip(keys, pieces, strict=True))  # it stays as it is


def on_whole_weights(original: type[nn.Module]) -> dict[str, Function]:
    """Return the methods of a class that its parts run on whole weights. Collective calls.

    What was merged is an attribute of the layer, which ranks compare at their next call; the gathers are turns.
    """
    return {name: _run(getattr(original, name)) for name in WRITERS if callable(getattr(original, name, None))}


def _run(method: Function) -> Function:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with whole_weights(self):
            return method(self, *args, **kwargs)

    return run


@contextlib.contextmanager
@torch.no_grad()
def whole_weights(part: nn.Module) -> Iterator[None]:
    """Give a part and those in it whole parameters within this context; what these are then is kept. Collective."""
    tables: list[Any] = [(m, m._parameters) for m in part.modules() if getattr(m, "_storages", None)]
    wholes = {}  # by identity of a first piece, so that what is tied stays tied
    try:
        for owner, table in tables:
            owner._parameters = dict(table)
            for leaf, storage, pieces in _holdings(owner, table):
                if id(pieces[0]) not in wholes:
                    value = storage.full([p.detach() for p in pieces]).clone()
                    wholes[id(pieces[0])] = nn.Parameter(value, pieces[0].requires_grad)
                owner._parameters[leaf] = wholes[id(pieces[0])]
        yield
        for owner, table in tables:
            for leaf, storage, pieces in _holdings(owner, table):
                storage.write(pieces, owner._parameters[leaf].detach())
    finally:
        for owner, table in tables:
            owner._parameters = table


def _holdings(owner: Any, table: Mapping[str, Any]) -> Iterator[tuple[str, Storage, list[Any]]]:
    """Iterate over a module's parameters by the original's name: how each is held, and the pieces that `table` has."""
    for leaf, storage in owner._storages.items():
        yield leaf, storage, [table[name] for name in storage.names(leaf)]
