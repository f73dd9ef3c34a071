"""What tells before a call whether a sharded module is as it was: one number, and copies to compare with.

The number rises when something is set on a part, hooked to it or put in its place. What all parts are like takes a walk
through objects that no step of decoding has in its caches; with the same number as before the answer is that of before.
Of a list, a dict or an object with attributes, which anybody may change from within, there is a copy; what is set on a
part is known by a token.
"""

from __future__ import annotations

import copy
import enum
import functools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autotp.capture.model_key import Untold, words
from autotp.driver.modes import TRAINING, Mode, mode_with, parameters_of, shortened

from .boundaries import hooked

VERSION = attrgetter("_version")
CONTAINERS = (list, dict, set)
WRITERS = (
    "__setitem__", "__delitem__", "__ior__", "clear", "move_to_end", "pop", "popitem", "setdefault", "update",
)  # fmt: skip


PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True)
class Same:
    """Stands for a value that can be told from others by its identity alone."""

    value: Any = field(hash=False, compare=False, repr=False)
    at: int = field(repr=False)  # another in each process, so that ranks compare the rest


def token(value: Any) -> Hashable:
    """What says whether another value is the same."""
    plain = isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value))
    if not plain and callable(value) and (text := _words(value)):
        return type(value), text
    return (type(value), value) if plain else (type(value), Same(value, id(value)))


def hooks_of(module: nn.Module) -> tuple[Hashable, ...]:
    """What says whether a module of the skeleton has other hooks: a capture of it runs them."""
    tables = [getattr(module, name) for name in HOOKS]
    return tuple([_described(hook) for table in tables for hook in table.values()])


def _described(hook: Any) -> Hashable:
    """What a hook is in every process, with what PEFT's partial functions hold; of a closure its identity."""
    return _words(hook) or token(hook)


def _words(value: Any) -> str:
    """What a value is in every process, such as a function of a module; "" where that cannot be told."""
    try:
        return repr(words(value))
    except Untold:
        return ""


def comparable(key: Hashable) -> bool:
    """Whether a key says the same in every process: none of its values is known by its identity alone."""
    return all(map(comparable, key)) if isinstance(key, tuple) else not isinstance(key, Same)


class Revision:
    """Of all parts of this process: `number` rises with every change."""

    number = 0


def _counting(kind: type[Any]) -> type[Any]:
    """The class, whose methods that write count."""

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            Revision.number += 1
            return method(self, *args, **kwargs)

        return write

    for name in WRITERS:
        if hasattr(kind, name):
            setattr(kind, name, counting(getattr(kind, name)))
    return kind


@_counting
class CountedDict(dict[Any, Any]):
    """Counts what is written to it."""


@_counting
class CountedOrderedDict(OrderedDict[Any, Any]):
    """Likewise."""


# What of a part is a dictionary that decides what its call does.
TABLES = (
    "_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def counted(table: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary as one that counts what is written to it."""
    if isinstance(table, CountedDict | CountedOrderedDict):
        return table
    return CountedOrderedDict(table) if isinstance(table, OrderedDict) else CountedDict(table)


@dataclass
class Inventory:
    """What the parts of a module hold and which mode they are in, listed again where the revision is another.

    Attributes:
        parts: of the module.
    """

    parts: Sequence[nn.Module]
    _revision: int = -1
    _training: Any = None
    _parameters: list[nn.Parameter] = field(default_factory=list)
    _hooked: tuple[bool, bool] = (False, False)

    def _list(self) -> None:
        if self._revision != Revision.number:
            forward = any(hooked(part._forward_pre_hooks, part._forward_hooks) for part in self.parts)
            self._hooked = forward, any(hooked(part._backward_pre_hooks, part._backward_hooks) for part in self.parts)
            self._training = shortened(list(map(TRAINING, self.parts)))
            self._parameters, self._revision = parameters_of(self.parts), Revision.number

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that the parts themselves hold."""
        self._list()
        return self._parameters

    @property
    def hooked(self) -> tuple[bool, bool]:
        """Whether there are hooks of the user's on the forward, and on the backward, of some part."""
        self._list()
        return self._hooked

    def parameter_state(self) -> tuple[int, int]:
        """Which parameters are trained, as a number, and how often all were written."""
        parameters = self.parameters
        try:
            versions = sum(map(VERSION, parameters))
        except RuntimeError:  # tensors of inference count no versions
            versions = sum([p._version for p in parameters if not p.is_inference()])
        if not torch.is_grad_enabled():
            return 0, versions
        return zlib.crc32(bytes([p.requires_grad for p in parameters])), versions

    def mode(self, device: torch.device) -> Mode:
        """What a capture is made for now. Types and gradients are the tensors' own, and asked each time."""
        self._list()
        return mode_with(self._training, self.parts, self._parameters, device)


def contents(value: Any) -> Any:
    """A copy for comparison; of an object it is the attributes."""
    if isinstance(value, CONTAINERS):
        return _still(value)
    attributes = attributes_of(value)
    return attributes | {k: _still(v) for k, v in attributes.items() if isinstance(v, CONTAINERS)}


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, past its class's own way of giving them: a config's is slow."""
    return object.__getattribute__(value, "__dict__")


def _still(value: Any) -> Any:
    """A copy; what is equal to itself alone, and tensors, are themselves: a copy would look changed."""
    if isinstance(value, dict):
        return {k: _still(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_still, value))
    alone = isinstance(value, Tensor) or type(value).__eq__ is object.__eq__
    return value if alone else copy.deepcopy(value)
