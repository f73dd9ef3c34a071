"""Methods of the original's class that a sharded module and its parts have in another way; all others they inherit."""

from __future__ import annotations

from typing import Any

from torch import nn

from autotp.errors import StateError
from autotp.ir.graph import Function

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
    """An attribute that the original has and the sharded module has not: says what to take in its place."""


class Absent:
    """In place of a method: it is not there, and `Part.__getattr__` says why."""

    def __get__(self, part: Any, owner: Any = None) -> Any:
        raise AttributeError


def in_place_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return what parts have in place of methods of a class: these refuse, or put hooks where a trace runs them."""
    absent = {n: Absent() for n in ABSENT if hasattr(original, n)}
    hooking = {n: _on_original(n) for n in ON_ORIGINAL if hasattr(original, n)}
    return absent | hooking | {n: _refuser(n) for n in REFUSED if callable(getattr(original, n, None))}


def _on_original(name: str) -> Function:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__["_watched"].module, name)(*args, **kwargs)

    return run


def _refuser(name: str) -> Function:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StateError(REFUSED[name].format(name=name))

    return refuse
