"""Attributes that a user sets on parts of a sharded module: heeded by a new capture, or refused at that moment.

A program holds the values that the original's attributes had when it was captured. So what is set belongs to what a
program is for, like the training flags: with `norm.eps` changed, the next call is a new kind of call, and with the old
value back the old program serves again.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autotp.capture.copies import parts_of
from autotp.comm.ranks import Facts
from autotp.errors import StateError

from .revision import CONTAINERS, HOOKS, Revision, attributes_of, contents, count_writes, hooks_of, words_of
from .weight_reads import MADE

TORCHS = frozenset(nn.Module().__dict__)  # what torch itself keeps on a module; the training flag is a mode's
LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)  # what is in one is run
WITHIN = "within "  # before the name of an attribute that is the same object still
INSTEAD = "Change it in the original model, and compile that."
SUMMED = (
    "this is split over a further mesh, as by torch's fully_shard or replicate, which sum gradients in an order of "
    "their own, and tp_invariant asks for the same bits on any number of ranks. Compile without it to wrap the module."
)
UNTOLD = (
    f"this is, or holds, what is known by its identity alone: ranks cannot tell whether all have the same. {INSTEAD}"
)
# Flags of layers, and what calls them, that transformers' and diffusers' switch for checkpointing may set as new.
SWITCHED = ("gradient_checkpointing", "_gradient_checkpointing_func")
RECOMPUTE = (
    "layers are computed again by torch.utils.checkpoint.checkpoint, and this switch gives them {name}, of which the "
    "programs would leave out what it does beside (such as offload=True). Switch checkpointing on without it."
)


@dataclass
class AttributeValue:
    """Value of an attribute, such as the original's config, that was handed out and can be changed from within."""

    watched: Watched
    name: str
    value: object
    contents: Any = None

    def __post_init__(self) -> None:
        self.contents = contents(self.value)
        self.container = isinstance(self.value, CONTAINERS)

    def has_changed(self) -> bool:
        """Return whether it is another than when it was last asked."""
        now = self.value if self.container else attributes_of(self.value)
        try:
            same = bool(now == self.contents)  # asked before every call: nothing is copied for it
        except (RuntimeError, ValueError):  # tensors and arrays in it
            same = True
        if not same:
            self.contents = contents(self.value)
        return not same


@dataclass
class Changes:
    """Record of all that was set on the parts of one sharded module, which is `whole`."""

    whole: Any = None
    parts: list[Watched] = field(default_factory=list)
    values: list[AttributeValue] = field(default_factory=list)
    last_key: Hashable = ()
    stale: bool = False
    hooks: dict[str, tuple[Hashable, ...]] = field(default_factory=dict)
    revision: int = -1

    def key(self) -> Hashable:
        """Return what a program is for, of all this; `()` where all is as it was.

        Raises:
            StateError: ranks cannot tell of something that has changed whether it is the same on all.
        """
        # A field of a config, or an entry of a list: nobody tells of it, so all that was handed out is compared.
        for value in self.values:
            if value.has_changed():
                now = value.contents if value.container else sorted(value.contents.items())
                value.watched.note(WITHIN + value.name, now)
        if self.revision != Revision.number:
            # Before anything is sent: amid a program the other ranks would wait.
            if self.whole is not None and (name := self.whole._shards.taken_away()):
                raise StateError(MADE.format(name=name))
            # Hooks on the skeleton are run by a capture. One known by its identity alone may be another on each rank.
            hooks = {w.path: now for w in self.parts if (now := hooks_of(w.module)) != w.hooks}
            for watched in self.parts:
                if not all(isinstance(hook, str) for hook in hooks.get(watched.path, ())):
                    watched.refuse("a hook", UNTOLD)
            self.stale, self.hooks, self.revision = self.stale or hooks != self.hooks, hooks, Revision.number
        # Made anew only where something was noted: it is asked for before every call.
        if self.stale:
            changes = ((w.path, n, t) for w in self.parts for n, t in sorted(w.versions.items()))
            self.last_key, self.stale = (*changes, *self.hooks.items()), False
        return self.last_key

    def facts(self) -> Facts:
        """Return the same in words, for the ranks to compare."""
        texts: Facts = {f"hooks of {path}": hooks for path, hooks in self.hooks.items()}
        for w in self.parts:
            texts |= {f"attribute {w.path}.{name}".replace(" .", " "): text for name, text in w.versions.items()}
        return texts

    def apply(self, modules: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Set the same on the modules of a skeleton; `modules` are these and the parts that stand for them."""
        for module, part in modules:
            watched = getattr(part, "_watched", None)
            for key in watched.versions if watched is not None else ():
                name = key.removeprefix(WITHIN)
                value = part.__dict__.get(name)
                if name in part.__dict__ and (key == name or isinstance(value, CONTAINERS)):
                    setattr(module, name, copy.deepcopy(value))  # a config is the skeleton's own


class Watched:
    """Module of the original that a part stands for, and what was set on the part since.

    Attributes:
        module: of the skeleton, without weights.
        path: its name in the original.
        changes: of the whole sharded module.
        children: the parts that stand for the module's own children.
        versions: name of an attribute -> its value in words.
        hooks: of the module, as it was compiled; `generate` of its class may add to them (PEFT's adapters by row).
    """

    def __init__(self, module: nn.Module, path: str, changes: Changes, children: Mapping[str, nn.Module]) -> None:
        self.module, self.path, self.changes = module, path, changes
        self.children = dict(children)
        self.versions: dict[str, str] = {}
        count_writes(module, HOOKS)
        self.hooks = hooks_of(module)
        changes.parts.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        """Copy for a part that is copied alone, which is of no module; a copied module watches its parts anew."""
        new = Watched(self.module, self.path, Changes(), self.children)
        new.versions |= self.versions
        return new

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise a `StateError` for `what` of this module."""
        where = f"{self.path} ({type(self.module).__name__})" if self.path else f"this {type(self.module).__name__}"
        raise StateError(f"{what} of {where}: {reason}")

    def note(self, name: str, value: Any) -> None:
        """Remember what an attribute is now, or within it.

        Raises:
            StateError: ranks cannot tell whether it is the same on all.
        """
        self.versions[name] = words_of(value) or self.refuse(name, UNTOLD)
        self.changes.stale = True

    # ---- attributes ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Return whether the original's module has a plain attribute of this name, of its own or by its class."""
        if name in TORCHS:
            return False
        if name in self.module.__dict__ or name in SWITCHED:
            return True
        attribute = getattr(type(self.module), name, None) if name not in nn.Module.__dict__ else None
        return attribute is not None and not callable(attribute) and not hasattr(type(attribute), "__get__")

    def read(self, part: nn.Module, name: str) -> Any:
        """Return the original's attribute; what can be changed from within is watched from now on."""
        value = self.module.__dict__[name]
        if isinstance(value, types.MethodType) and value.__self__ is self.module:
            return types.MethodType(value.__func__, part)
        if _holds(value, Tensor | nn.Module):
            raise AttributeError(
                f"{name} of {self.path or 'the module'} is or holds tensors or modules that are no parameters, buffers "
                "or children: a sharded module does not keep those. Read it on the original model."
            )
        if isinstance(value, CONTAINERS):
            value = part.__dict__[name] = copy.deepcopy(value)
        self.lend(name, value)
        return value

    def lend(self, name: str, value: Any) -> None:
        """Watch a value that can be changed from within."""
        if (isinstance(value, CONTAINERS) or _plain_object(value)) and all(
            x.value is not value for x in self.changes.values
        ):
            self.changes.values.append(AttributeValue(self, name, value))

    def set(self, part: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute is set, or refuse it.

        Args:
            part: whose attribute it is. name, value: of the attribute.

        Raises:
            StateError: the programs of the module cannot follow.
        """
        # `eval()` sets `training` on every part: a mode of the program, and no change of the model.
        if name in TORCHS:
            return
        self._mesh(name, value)
        # A fused weight is held as `weight_part0` and on; one set under its whole name would be read by nothing.
        if advice := self.in_parts(part, name):
            raise StateError(advice)
        # Parameters, modules and buffers are what the program computes with: it has their shapes and splits.
        if name in self.module._parameters:
            self._parameter(part, name, value)
        elif isinstance(value, nn.Module) or name in self.children:
            self.place(part, name, value)
        elif name in self.module._buffers:
            self._buffer(part, name, value)
        elif self.has(name):
            _refuse_other_checkpoints(name, value)
            # Compared with the original, not with what was set last: `norm.eps` back at its old value calls the old
            # program again.
            was = self.module.__dict__.get(name, getattr(type(self.module), name, None))
            if value is was or (words_of(value) and words_of(value) == words_of(was)):
                self.versions.pop(name, None)
            else:
                self.note(name, value)
            # Changes within are counted for the object that stood here; its successor starts with none.
            self.versions.pop(WITHIN + name, None)
            self.changes.values = [x for x in self.changes.values if (x.watched, x.name) != (self, name)]
            self.changes.stale = True
            self.lend(name, value)

    def delete(self, part: nn.Module, name: str) -> None:
        """Refuse to delete what the program needs; a parameter's name may be taken over by a hook."""
        if name in self.children or (name not in self.module._parameters and self.has(name)):
            self.refuse(name, f"it cannot be deleted after compile, because the program was made with it. {INSTEAD}")

    def in_parts(self, part: nn.Module, name: str) -> str:
        """Return what to use in place of a parameter that is held in several; empty where this is the name of none."""
        where, components = self.path or "the module", parts_of(self.module, name)
        if components:
            return (
                f"{name} of {where} is quantised, and held as what it is made of, each part split by itself: "
                f"{', '.join(components)}. Use those; full_state_dict() has them whole."
            )
        if name not in self.module._parameters or f"{name}_part0" not in part._parameters:
            return ""
        names = [n for n in part._parameters if n.startswith(f"{name}_part")]
        return (
            f"{name} of {where} is held in pieces, because its parts are split each by itself: {', '.join(names)}. Use "
            "those; full_state_dict() and load_state_dict() have it whole."
        )

    # ---- what has a place in the tree ------------------------------------------------------------------------------

    def place(self, part: nn.Module, name: str, module: nn.Module | None) -> None:
        """Refuse to put a module in a part's place that would get shards for what it takes for whole tensors."""
        child = self.children.get(name)
        if child is None and isinstance(self.module, LISTS) and any(True for _ in (module or nn.Module()).parameters()):
            self.refuse(name, f"a further layer has no place in the plan. {INSTEAD}")
        if child is not None and module is not part._modules.get(name) and (reason := foreign(child, module)):
            self.refuse(name, reason)

    def _mesh(self, name: str, value: Any) -> None:
        """Refuse a tensor over a further mesh, such as data parallelism's, where sums are to be along the tree."""
        shards = getattr(self.changes.whole, "_shards", None) if isinstance(value, DTensor) else None
        if shards is not None and shards.host is not None and value.device_mesh != shards.ranks.mesh:
            self.refuse(name, SUMMED)

    def _parameter(self, part: nn.Module, name: str, value: Any) -> None:
        parameter = part._parameters.get(name)
        if value is parameter and (parameter is not None or self.module._parameters[name] is None):
            return
        was = self.module._parameters[name]
        if was is None or not isinstance(value, Tensor):
            what = "another parameter than the plan has" if was is None else f"{type(value).__name__} for a parameter"
            self.refuse(name, f"this is {what}. {INSTEAD}")
        shape = parameter.shape if parameter is not None else was.shape
        if value.shape != shape:
            self.refuse(name, f"this has the shape {tuple(value.shape)}, and the plan {tuple(shape)}. {INSTEAD}")
        if isinstance(parameter, DTensor) and not _is_placed_as(value, parameter):
            self.refuse(
                name,
                "this tensor is not split as the parameter that is there, which optimizers and checkpoints know. Copy "
                "its values: assign .data, or use load_state_dict. To split over dp too: compile(fully_shard=True).",
            )

    def _buffer(self, part: nn.Module, name: str, value: Any) -> None:
        buffer = part._buffers.get(name)
        if (
            not isinstance(value, Tensor)
            or buffer is None
            or (value.shape, value.dtype) != (buffer.shape, buffer.dtype)
        ):
            self.refuse(
                name, f"the program takes the buffer in the shape and dtype that it was captured with. {INSTEAD}"
            )


def _refuse_other_checkpoints(name: str, value: Any) -> None:
    function: Any = value.func if isinstance(value, functools.partial) else value
    if name in SWITCHED and callable(function) and function is not checkpoint:
        raise StateError(RECOMPUTE.format(name=getattr(function, "__qualname__", type(function).__name__)))


def _is_placed_as(value: Tensor, parameter: DTensor) -> bool:
    """Return whether placements are equal; those over another mesh are data parallelism's, and for it to judge."""
    if not isinstance(value, DTensor):
        return False
    return value.device_mesh != parameter.device_mesh or value.placements == parameter.placements


def foreign(part: nn.Module, module: nn.Module | None) -> str:
    """Return why a module cannot take a part's place; "" for the part, and for a wrapper without tensors of its own."""
    if module is None or not any(m is part for m in module.modules()):
        return (
            f"{type(module).__name__} cannot take a layer's place after compile: the plan, the parameters and the "
            f"program are that layer's. {INSTEAD}"
        )
    inside = {id(t) for t in [*part.parameters(), *part.buffers()]}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    name = next((n for n, t in tensors if id(t) not in inside), "")
    if name:
        return (
            f"{type(module).__name__} has tensors of its own around the layer, such as {name}, and would compute "
            "with shards. Put it (an adapter, a quantiser) into the original model, and compile that."
        )
    return ""


def _holds(value: Any, kinds: Any) -> bool:
    if isinstance(value, (*CONTAINERS, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return any(_holds(v, kinds) for v in inner)
    return isinstance(value, kinds)


def _plain_object(value: Any) -> bool:
    """Return whether it has attributes that may be set: a config, a namespace, a record."""
    opaque = callable(value) or isinstance(value, types.ModuleType | enum.Enum | Tensor)
    return hasattr(value, "__dict__") and not opaque
