"""Objects that hold state between calls, such as a key/value cache, in the calls of a sharded module.

The caller's object stays what it is, and holds this rank's tensors: what reorders, crops or selects its rows acts on
them. A call is recognised by the object's shape and sizes; afterwards what the program says it holds is set on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autotp import compat
from autotp.ir.carried import Carried, Returned, Same, assign, describe, is_carrier, moved, rebuilt
from autotp.ir.graph import Capture


@dataclass
class Carriers:
    """What a sharded module knows of the objects that it is given.

    Attributes:
        names: of the positional arguments.
        moving: attributes whose whole numbers change from call to call, as (class, attribute).
    """

    names: tuple[str, ...]
    moving: set[tuple[type, str]] = field(default_factory=set)

    @classmethod
    def of(cls, bare: nn.Module) -> Carriers:
        return cls(tuple(inspect.signature(bare.forward).parameters))

    def __deepcopy__(self, memo: dict[int, Any]) -> Carriers:
        return Carriers(self.names, set(self.moving))

    def told(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Given]:
        """The arguments with every such object as its tensors, and which those are."""
        given: Given = []

        def one(value: Any, name: str) -> Any:
            if not is_carrier(value):
                return value
            given.append((value, describe(value, name, self.moving)))
            return given[-1][1]

        positional = [one(x, self.names[i] if i < len(self.names) else str(i)) for i, x in enumerate(args)]
        return tuple(positional), {name: one(x, name) for name, x in kwargs.items()}, given

    def learn(self, captured: Capture) -> bool:
        """Whether a capture shows numbers that change from call to call and that were not known to."""
        args, kwargs = compat.tree_unflatten([None] * captured.in_spec.num_leaves, captured.in_spec)
        before = [x for x in (*args, *kwargs.values()) if isinstance(x, Carried)]
        returned = compat.tree_unflatten([None] * captured.out_spec.num_leaves, captured.out_spec)
        if not isinstance(returned, Returned):
            return False
        found = (moved(x.shape.tree, y.shape.tree) for x, y in zip(before, returned.after, strict=True))
        new = set().union(*found) - self.moving
        self.moving |= new
        return bool(new)


Given = list[tuple[Any, Carried]]


def settled(outputs: Any, given: Given) -> Any:
    """A call's outputs, after the caller's objects hold what they hold after it."""
    if not isinstance(outputs, Returned):
        return outputs
    objects = [assign(obj, after, was.tensors) for (obj, was), after in zip(given, outputs.after, strict=True)]

    def whole(value: Any) -> Any:
        if isinstance(value, Same):
            return objects[value.index]
        return rebuilt(value) if isinstance(value, Carried) else value

    return compat.tree_map(whole, outputs.outputs, is_leaf=lambda x: isinstance(x, Same | Carried))
