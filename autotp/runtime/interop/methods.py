"""The methods and properties of the original's class on a sharded module: its own, run on the sharded one.

Parts are instances of the original's classes and have theirs by that. The sharded module itself looks them up here, as
late as Python allows, so that what autotp gives it comes first.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from autotp.errors import StateError

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
RECOMPUTE = (
    "layers are computed again by torch.utils.checkpoint.checkpoint, and this switch gives them {name}, of which the "
    "programs would leave out what it does beside (such as offload=True). Switch checkpointing on without it."
)
BATCHES = (
    "{name}: continuous batching keeps the keys and values of all requests in pages of one memory, and calls the model "
    "from a thread of its own; a sharded module has neither. Take sharded.generate(...), with prompts of several "
    "lengths padded on the left."
)
# What changes the modules that run, and does a part of that before it meets the first one that it may not; and what
# writes without the other ranks.
REFUSED = {
    "merge_and_unload": UNLOAD, "unload": UNLOAD, "delete_adapter": UNLOAD, "add_adapter": ADD, "load_adapter": ADD,
    "save_pretrained": SAVE,
}  # fmt: skip
SWITCH = "_set_gradient_checkpointing"  # of transformers and diffusers: flags of layers, and what calls them

# What libraries look for before they use it, and do without where it is not there.
ABSENT = {
    "generate_batch": BATCHES, "init_continuous_batching": BATCHES, "continuous_batching_context_manager": BATCHES,
    "destroy_cached_continuous_batching_manager": BATCHES,
}  # fmt: skip


class AbsentError(StateError, AttributeError):
    """An attribute that the original has and the sharded module has not: it says what to take in its place."""


def in_place_of(original: type[nn.Module]) -> dict[str, Any]:
    """What parts have in place of some of a class's methods: functions that refuse, or heed what the method sets."""
    absent = {n: property(_absent(n)) for n in ABSENT if hasattr(original, n)}
    switch = {SWITCH: switching(getattr(original, SWITCH))} if hasattr(original, SWITCH) else {}
    return absent | switch | {n: _refuser(n) for n in REFUSED if callable(getattr(original, n, None))}


def switching(switch: Callable[..., Any]) -> Callable[..., Any]:
    """A method that switches checkpointing of layers on or off, for parts: what it sets is heeded, new names too."""

    @functools.wraps(switch)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            function = value.func if isinstance(value, functools.partial) else value
            if callable(function) and function is not checkpoint:
                raise StateError(RECOMPUTE.format(name=getattr(function, "__qualname__", type(function).__name__)))
        changes = self.__dict__["_watched"].changes
        changes.adopts = True
        try:
            return switch(self, *args, **kwargs)
        finally:
            changes.adopts = False

    return run


def _absent(name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        raise AbsentError(ABSENT[name].format(name=name)) from None

    return read


def _refuser(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StateError(REFUSED[name].format(name=name))

    return refuse


class Methods:
    """For a sharded module."""

    _shards: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            shards = self.__dict__.get("_shards")
            if shards is None or name.startswith("__") or name in shards.bare._modules:
                raise
            member = self._of_the_original(shards.bare, name)
            if member is None:
                raise
        return member

    def _of_the_original(self, bare: nn.Module, name: str) -> Any:
        """What the original's class has, or what the original passes on of the modules in it."""
        if name in ABSENT and hasattr(bare, name):
            return _absent(name)(self)
        above = getattr(type(bare), name, None)
        # A property may ask for what the sharded module has in place of the skeleton's, such as its parameters.
        if isinstance(above, property):
            return above.__get__(self)
        # Methods of the original read its class's attributes, such as whether it supports checkpointing.
        if above is not None and not callable(above) and not hasattr(type(above), "__get__"):
            return above
        member = getattr(bare, name, None)  # by the class's own `__getattr__`, where it has one
        of: Any = member if isinstance(member, nn.Module) else getattr(member, "__self__", None)
        path = next((path for path, m in bare.named_modules() if m is of), None)
        if path is None:
            return member if isinstance(member, types.MethodType) else None  # of the class itself
        part = self._shards.parts[path]
        if member is of:
            return part
        if not isinstance(member, types.MethodType):
            return None
        return types.MethodType(in_place_of(type(of)).get(name, member.__func__), part)
