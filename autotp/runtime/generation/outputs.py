"""A program's outputs in the original's own class, made at every step as they were made at the first.

The class of transformers' outputs looks through its fields and checks them whenever one is made, which after a step
that has read all weights is worth one part in two hundred of it. What it found of a program's first outputs holds for
all of them: the same fields are tensors, and the same ones are None.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autotp import compat
from autotp.ir.carried import PLAIN


class Places(NamedTuple):
    """An ordered dictionary with attributes, and which leaf each of these and each item is; None of a None."""

    kind: type[OrderedDict[Any, Any]]
    attributes: Mapping[str, int | None]
    items: Mapping[Any, int]

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """The same with these leaves."""
        outputs = self.kind.__new__(self.kind)
        for name, at in self.attributes.items():
            outputs.__dict__[name] = None if at is None else leaves[at]
        for key, at in self.items.items():
            OrderedDict.__setitem__(outputs, key, leaves[at])  # past what the class does with a new item
        return outputs


class Outputs:
    """Of one program.

    Args:
        spec: how the leaves are nested.
    """

    def __init__(self, spec: compat.TreeSpec) -> None:
        self.spec, self.first = spec, True
        self.places: Places | None = None

    def of(self, leaves: Sequence[Any]) -> Any:
        """The outputs with these leaves."""
        if self.places is not None:
            return self.places.outputs(leaves)
        outputs = compat.tree_unflatten(leaves, self.spec)
        if self.first:
            self.first, self.places = False, places_of(outputs, leaves)
        return outputs


def places_of(outputs: Any, leaves: Sequence[Any]) -> Places | None:
    """Where the leaves are in an ordered dictionary with attributes.

    Returns: None of what is no such dictionary, or holds anything but leaves: how that is made only its class knows.
    """
    if not isinstance(outputs, OrderedDict) or not hasattr(outputs, "__dict__"):
        return None
    place: dict[int, int] = {id(leaf): at for at, leaf in enumerate(leaves)}
    attributes = vars(outputs)
    if any(isinstance(x, PLAIN) for x in leaves):  # one object may stand for equal ones
        return None
    if len(place) < len(leaves) or not all(x is None or id(x) in place for x in attributes.values()):
        return None
    if not all(id(x) in place for x in outputs.values()):
        return None
    items = {key: place[id(x)] for key, x in outputs.items()}
    return Places(type(outputs), {name: place.get(id(x)) for name, x in attributes.items()}, items)
