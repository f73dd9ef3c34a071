"""What a user sets on a sharded module's parts after compile: heeded by a new capture, or refused at that moment.

A program holds the values that the original's attributes had when it was captured. So what is set belongs to what a
program is for, like the training flags: with `norm.eps` changed, the next call is a new kind of call, and with the old
value back the old program serves again.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.capture.subclasses.weights import parts_of
from autotp.errors import StateError

from .revision import CONTAINERS, HOOKS, Revision, Same, attributes_of, contents, counted, hooks_of, token

TORCHS = frozenset(nn.Module().__dict__)  # what torch itself keeps on a module; the training flag is a mode's
LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)  # what is in one is run
WITHIN = "within "  # before the name of an attribute that is the same object still
INSTEAD = "Change it in the original model, and compile that."


@dataclass
class AttributeValue:
    """Something of the original's that can be changed from within, such as its config, and was handed out."""

    watched: Watched
    name: str
    value: Any
    contents: Any = None
    version: int = 0

    def __post_init__(self) -> None:
        self.contents = contents(self.value)
        self.container = isinstance(self.value, CONTAINERS)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeValue:
        """Of a copied module: its own list or dict, and the skeleton's config, which the copies share."""
        value = copy.deepcopy(self.value, memo) if self.container else self.value
        return AttributeValue(copy.deepcopy(self.watched, memo), self.name, value, version=self.version)

    def has_changed(self) -> bool:
        """Whether it is another than when it was last asked."""
        now = self.value if self.container else attributes_of(self.value)
        try:
            same = bool(now == self.contents)  # asked before every call: nothing is copied for it
        except (RuntimeError, ValueError):  # tensors and arrays in it
            same = True
        if not same:
            self.contents, self.version = contents(self.value), self.version + 1
        return not same


@dataclass
class Changes:
    """What was set on all parts of one sharded module, which is `whole`."""

    whole: Any = None
    parts: list[Watched] = field(default_factory=list)
    values: list[AttributeValue] = field(default_factory=list)
    last_key: Hashable = ()
    stale: bool = False
    hooks: dict[str, tuple[Hashable, ...]] = field(default_factory=dict)
    revision: int = -1
    adopts: bool = False  # while a method of the original's sets attributes that the original may not have yet

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, of the whole or of a part alone: the first says itself which module that is."""
        return vars(self) | {"whole": None}

    def key(self) -> Hashable:
        """What a program is for, of all this; `()` where all is as it was."""
        for value in self.values:
            if value.has_changed():
                value.watched.versions[WITHIN + value.name] = value.version
                self.stale = True
        if self.revision != Revision.number:
            hooks = {w.path: now for w in self.parts if (now := hooks_of(w.module)) != w.hooks}
            self.stale, self.hooks, self.revision = self.stale or hooks != self.hooks, hooks, Revision.number
        if self.stale:
            changes = ((w.path, n, t) for w in self.parts for n, t in sorted(w.versions.items()))
            self.last_key, self.stale = (*changes, *self.hooks.items()), False
        return self.last_key

    def facts(self) -> dict[str, str]:
        """The same in words, for the ranks to compare."""
        texts = {f"hooks of {path}": str(hooks) for path, hooks in self.hooks.items()}
        for watched in self.parts:
            for name, value in watched.versions.items():
                text = str(value)
                if isinstance(value, tuple) and isinstance(value[1], Same):
                    text = f"{value[0].__name__}, the {value[1].number}. that was set"
                texts[f"attribute {watched.path}.{name}".replace(" .", " ")] = text
        return texts

    def apply(self, modules: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Set the same on the modules of a skeleton; `modules` are these and the parts that stand for them."""
        for module, part in modules:
            watched = part.__dict__.get("_watched")
            for key in watched.versions if watched is not None else ():
                name = key.removeprefix(WITHIN)
                value = part.__dict__.get(name)
                if name in part.__dict__ and (key == name or isinstance(value, CONTAINERS)):
                    setattr(module, name, copy.deepcopy(value))  # a config is the skeleton's own


class Watched:
    """The original's module that a part stands for, and what was set on the part since.

    Attributes:
        module: of the skeleton, without weights.
        path: its name in the original.
        changes: of the whole sharded module.
        children: the parts that stand for the module's own children.
        versions: name of an attribute -> what tells its value from others. had: likewise all values that it was set to,
            of those that are known by their identity: ranks compare their places.
        adopted: names of attributes that a method of the original's has set, which it had not before.
        hooks: of the module, as it was compiled; `generate` of its class may add to them (PEFT's adapters by row).
    """

    def __init__(self, module: nn.Module, path: str, changes: Changes, children: Mapping[str, nn.Module]) -> None:
        self.module, self.path, self.changes = module, path, changes
        self.children, self.versions = dict(children), {}
        self.had: dict[str, list[Any]] = {}
        vars(module).update((name, counted(vars(module)[name])) for name in HOOKS)
        self.hooks = hooks_of(module)
        self.adopted: set[str] = set()
        changes.parts.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        new = object.__new__(Watched)
        memo[id(self)] = new
        new.module, new.path, new.versions, new.hooks = self.module, self.path, dict(self.versions), self.hooks
        new.adopted = set(self.adopted)
        new.had = {name: [*values] for name, values in self.had.items()}
        new.changes, new.children = copy.deepcopy(self.changes, memo), copy.deepcopy(self.children, memo)
        return new

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raise a `StateError` for `what` of this module."""
        where = f"{self.path} ({type(self.module).__name__})" if self.path else f"this {type(self.module).__name__}"
        raise StateError(f"{what} of {where}: {why}")

    # ---- attributes ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the original's module has a plain attribute of this name, of its own or by its class."""
        if name in TORCHS:
            return False
        if name in self.module.__dict__ or name in self.adopted:
            return True
        attribute = getattr(type(self.module), name, None) if name not in nn.Module.__dict__ else None
        return attribute is not None and not callable(attribute) and not hasattr(type(attribute), "__get__")

    def read(self, part: nn.Module, name: str) -> Any:
        """The original's attribute; what can be changed from within is watched from now on."""
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
        # A fused weight is held as `weight_part0` and on; one set under its whole name would be read by nothing.
        if advice := self.in_parts(part, name):
            raise StateError(advice)
        if self.changes.adopts:
            self.adopted.add(name)
        # Parameters, modules and buffers are what the program computes with: it has their shapes and splits.
        if name in self.module._parameters:
            self._parameter(part, name, value)
        elif isinstance(value, nn.Module) or name in self.children:
            self.place(part, name, value)
        elif name in self.module._buffers:
            self._buffer(part, name, value)
        elif self.has(name):
            # Compared with the original, not with what was set last: `norm.eps` back at its old value calls the old
            # program again.
            was = self.module.__dict__.get(name, getattr(type(self.module), name, None))
            if token(value) == token(was):
                self.versions.pop(name, None)
            else:
                self.versions[name] = self.numbered(name, token(value))
            # Changes within are counted for the object that stood here; its successor starts with none.
            self.versions.pop(WITHIN + name, None)
            self.changes.values = [x for x in self.changes.values if (x.watched, x.name) != (self, name)]
            self.changes.stale = True
            self.lend(name, value)

    def numbered(self, name: str, value: Any) -> Hashable:
        """The token of a value; of one that is known by its identity, with its place among those that were set."""
        if not isinstance(value[1], Same):
            return value
        earlier = self.had.setdefault(name, [])
        if value not in earlier:
            earlier.append(value)
        return value[0], replace(value[1], number=1 + earlier.index(value))

    def delete(self, part: nn.Module, name: str) -> None:
        """Refuse to delete what the program needs; a parameter's name may be taken over by a hook."""
        if name in self.children or (name not in self.module._parameters and self.has(name)):
            self.refuse(name, f"it cannot be deleted after compile, because the program was made with it. {INSTEAD}")

    def in_parts(self, part: nn.Module, name: str) -> str:
        """What to use in place of a parameter that is held in several; empty where this is the name of none."""
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
        if child is not None and module is not part._modules.get(name):
            why = foreign(child, module)
            if why:
                self.refuse(name, why)

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
        if isinstance(parameter, DTensor) and not lies_as(value, parameter):
            self.refuse(
                name,
                "this tensor is not split as the parameter that is there, which optimizers and checkpoints know. Copy "
                "its values: assign .data, or use load_state_dict.",
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


def lies_as(value: Tensor, parameter: DTensor) -> bool:
    """Whether a tensor lies as this one does; over another mesh, data parallelism's, that is for it to say."""
    if not isinstance(value, DTensor):
        return False
    return value.device_mesh != parameter.device_mesh or value.placements == parameter.placements


def foreign(part: nn.Module, module: nn.Module | None) -> str:
    """Why a module cannot take a part's place; empty for the part, and for what wraps it and has nothing of its own."""
    inside = list(module.modules()) if module is not None else []
    if not any(m is part for m in inside):
        name = type(module).__name__
        return (
            f"{name} cannot take a layer's place after compile: the plan, the parameters and the program are that "
            f"layer's. {INSTEAD}"
        )
    own_ids = {id(t) for t in [*part.parameters(), *part.buffers()]}
    own = [n for m in [module] for n, t in [*m.named_parameters(), *m.named_buffers()] if id(t) not in own_ids]  # type: ignore[union-attr]
    if own:
        return (
            f"{type(module).__name__} has tensors of its own around the layer, such as {own[0]}, and would compute "
            "with shards. Put it (an adapter, a quantiser) into the original model, and compile that."
        )
    return ""


def _holds(value: Any, kinds: Any) -> bool:
    if isinstance(value, (*CONTAINERS, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return any(_holds(v, kinds) for v in inner)
    return isinstance(value, kinds)


def _plain_object(value: Any) -> bool:
    """Whether it has attributes that may be set: a config, a namespace, a record."""
    odd = callable(value) or isinstance(value, types.ModuleType | enum.Enum | Tensor)
    return hasattr(value, "__dict__") and not odd
