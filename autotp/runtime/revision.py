"""Revision of a sharded module, by which a call knows whether it is as it was: one number, and copies to compare with.

The number rises when something is set on a part, hooked to it or put in its place. What all parts are like takes a walk
through objects that no step of decoding has in its caches; with the same number as before the answer is that of before.
Of a list, a dict or an object with attributes, which anybody may change from within, there is a copy; what is set on a
part is known by its words.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.capture.rank0 import Untold, words
from autotp.capture.request import TRAINING, Mode, mode_with, parameters_of, shortened
from autotp.ir.graph import Function

from .module_hooks import hooked

VERSION = attrgetter("_version")
CONTAINERS = (list, dict, set)
WRITERS = (
    "__setitem__", "__delitem__", "__ior__", "clear", "move_to_end", "pop", "popitem", "setdefault", "update",
)  # fmt: skip


HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def words_of(value: Any) -> str:
    """Return a value in words that are the same in every process; "" where it is known by its identity alone."""
    try:
        return repr(words(value))
    except Untold:
        return ""


def hooks_of(module: nn.Module) -> tuple[Hashable, ...]:
    """Return what says whether a module of the skeleton has other hooks: a capture of it runs them."""
    tables = [getattr(module, name) for name in HOOKS]
    return tuple([words_of(hook) or id(hook) for table in tables for hook in table.values()])


class Revision:
    """Holder of a number, of all parts of this process, that rises with every change."""

    number = 0


def _counting(method: Function) -> Function:
    """Return a method that writes, which counts."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        Revision.number += 1
        return method(self, *args, **kwargs)

    return write


class CountedDict(OrderedDict[Any, Any]):
    """Dictionary that counts writes to it."""


for _name in WRITERS:
    setattr(CountedDict, _name, _counting(getattr(OrderedDict, _name)))

# What of a part is a dictionary that decides what its call does.
TABLES = (
    "_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def counted(table: dict[Any, Any]) -> CountedDict:
    """Return the dictionary as one that counts writes to it."""
    return table if isinstance(table, CountedDict) else CountedDict(table)


def count_writes(module: nn.Module, names: Iterable[str]) -> None:
    """Count from now on what is written to these dictionaries of a module."""
    vars(module).update((name, counted(vars(module)[name])) for name in names)


@dataclass
class WriteCount:
    """Count of writes to tensors: to themselves, or by this rank's parts (`to_local()`).

    Attributes:
        tensors: plain ones or DTensors.
    """

    tensors: Sequence[Tensor]
    _counted: list[Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Look for the parts of the tensors anew at the next count: others stand for them."""
        self._counted = []

    def number(self) -> int:
        """Return the sum over all, which a write makes larger."""
        if not self._counted:
            self._counted = [*self.tensors, *map(compat.part_of, self.tensors)]
        try:
            return sum(map(VERSION, self._counted))
        except RuntimeError:  # tensors of inference count no versions
            return sum([t._version for t in self._counted if not t.is_inference()])


@dataclass
class Inventory:
    """List of what the parts of a module hold and which mode they are in, listed again where the revision is another.

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
        """Parameters that the parts themselves hold."""
        self._list()
        return self._parameters

    @property
    def hooked(self) -> tuple[bool, bool]:
        """Flags that say whether there are hooks of the user's on the forward, and on the backward, of some part."""
        self._list()
        return self._hooked

    def trained(self) -> int:
        """Return which parameters are trained, as a number; 0 where nothing is graded."""
        if not torch.is_grad_enabled():
            return 0
        return zlib.crc32(bytes([p.requires_grad for p in self.parameters]))

    def forget(self) -> None:
        """List all anew when next asked."""
        self._revision = -1

    @property
    def writes(self) -> int:
        """Count of writes to parameters."""
        self._list()
        return self._count.number()

    def mode(self, device: torch.device) -> Mode:
        """Return what a capture is made for now. Types and gradients are the tensors' own, and asked each time."""
        self._list()
        return mode_with(self._training, self.parts, self._parameters, device)


def contents(value: Any) -> Any:
    """Return a copy for comparison; of an object its attributes."""
    if isinstance(value, CONTAINERS):
        return _still(value)
    attributes = attributes_of(value)
    return attributes | {k: _still(v) for k, v in attributes.items() if isinstance(v, CONTAINERS)}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, past its class's own way of giving them: a config's is slow."""
    return object.__getattribute__(value, "__dict__")


def _still(value: Any) -> Any:
    """Return a copy; tensors, and what is equal to itself alone, stay themselves: a copy would look changed."""
    if isinstance(value, dict):
        return {k: _still(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_still, value))
    alone = isinstance(value, Tensor) or type(value).__eq__ is object.__eq__
    return value if alone else copy.deepcopy(value)
