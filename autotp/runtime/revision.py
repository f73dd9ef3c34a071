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

from autotp import compat
from autotp.capture.model_key import Untold, words
from autotp.capture.request import TRAINING, Mode, mode_with, parameters_of, shortened
from autotp.runtime.interop import data_writes
from autotp.runtime.interop.data_writes import DataWrites

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
    number: int = field(default=0, hash=False, compare=False)  # among the values that an attribute has had


def token(value: Any) -> Hashable:
    """What says whether another value is the same; of a container, whether it has the same plain values in it."""
    if isinstance(value, PLAIN):
        return type(value), value
    if callable(value) and (text := _words(value)):
        return type(value), text
    if type(value) in (tuple, list, dict, set):
        within: Any = value
        items = [*map(_plain, within.items() if isinstance(value, dict) else within)]
        if items and "" not in items:  # of a set of strings each process has another order
            return type(value), tuple(sorted(items) if isinstance(value, set) else items)
    return type(value), Same(value, id(value))


def _plain(value: Any) -> str:
    """A plain value, or a pair of them, as text; "" for others."""
    pair = value if isinstance(value, tuple) else (value,)
    if any(not isinstance(v, PLAIN) for v in pair):
        return ""
    return repr([(type(v).__name__, v) for v in pair])


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
class WriteCount:
    """How often tensors were written: themselves, by this rank's parts (`to_local()`), or by their `.data`.

    Attributes:
        tensors: plain ones or DTensors.
    """

    tensors: Sequence[Tensor]
    _revision: int = -1
    _counted: list[Tensor] = field(default_factory=list)
    _data_writes: list[DataWrites] = field(default_factory=list)

    def forget(self) -> None:
        """Look for the parts of the tensors anew at the next count: others stand for them."""
        self._revision = -1

    def number(self) -> int:
        """The sum over all, which a write makes larger."""
        if self._revision != data_writes.tables.revision:
            parts, self._revision = list(map(compat.part_of, self.tensors)), data_writes.tables.revision
            self._counted, self._data_writes = [*self.tensors, *parts], data_writes.entries_of(parts)
        try:
            versions = sum(map(VERSION, self._counted))
        except RuntimeError:  # tensors of inference count no versions
            versions = sum([t._version for t in self._counted if not t.is_inference()])
        return versions + sum([entry.number for entry in self._data_writes])


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
    _count: WriteCount = field(default_factory=lambda: WriteCount(()))
    _hooked: tuple[bool, bool] = (False, False)

    def _list(self) -> None:
        if self._revision != Revision.number:
            forward = any(hooked(part._forward_pre_hooks, part._forward_hooks) for part in self.parts)
            self._hooked = forward, any(hooked(part._backward_pre_hooks, part._backward_hooks) for part in self.parts)
            self._training = shortened(list(map(TRAINING, self.parts)))
            self._parameters, self._revision = parameters_of(self.parts), Revision.number
            self._count = WriteCount(self._parameters)

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

    def trained(self) -> int:
        """Which parameters are trained, as a number; 0 where nothing is graded."""
        if not torch.is_grad_enabled():
            return 0
        return zlib.crc32(bytes([p.requires_grad for p in self.parameters]))

    def forget(self) -> None:
        """List all anew when next asked."""
        self._revision = -1

    @property
    def writes(self) -> int:
        """How often parameters were written."""
        self._list()
        return self._count.number()

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
