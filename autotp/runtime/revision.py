"""Whether anything was set on parts of sharded modules, hooked to them or put in their place, told by one number.

Before every call is asked what all parts are like: a walk through objects that no step of decoding has in its caches.
With the same number as before the answer is the one of before.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autotp.driver.modes import TRAINING, Mode, mode_with, parameters_of, shortened

WRITERS = (
    "__setitem__", "__delitem__", "__ior__", "clear", "move_to_end", "pop", "popitem", "setdefault", "update",
)  # fmt: skip


class Revision:
    """Of all parts of this process: `number` rises with every change."""

    number = 0


def _counted(kind: type[Any]) -> type[Any]:
    """The class of dictionaries of this kind that count what is written to them."""

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            Revision.number += 1
            return method(self, *args, **kwargs)

        return write

    body = {name: counting(getattr(kind, name)) for name in WRITERS if hasattr(kind, name)}
    return type(f"Counted{kind.__name__}", (kind,), body)


CountedDict, CountedOrderedDict = _counted(dict), _counted(OrderedDict)
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

    def _list(self) -> None:
        if self._revision != Revision.number:
            self._training = shortened(list(map(TRAINING, self.parts)))
            self._parameters, self._revision = parameters_of(self.parts), Revision.number

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that the parts themselves hold."""
        self._list()
        return self._parameters

    def mode(self, device: torch.device) -> Mode:
        """What a capture is made for now. Types and gradients are the tensors' own, and asked each time."""
        self._list()
        return mode_with(self._training, self.parts, self._parameters, device)
