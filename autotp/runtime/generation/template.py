"""The description of an object as a few comparisons, by which the same object is read again without a walk.

A cache is passed at every decoded token, and is described as it was one token before. A template compares what is
there with that in loops of the interpreter's own; what it does not find is described anew by `autotp.ir.carried`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from autotp.ir.carried import PLAIN, SHIFT, Compound, Count, EarlierTensor, Fixed, Shape, TensorSlot, counted

Values = Callable[[Sequence[Any]], Sequence[Any]]  # some of them, by their places


class Holder(NamedTuple):
    """One object, list, tuple or dictionary of a description.

    Attributes:
        kind: its class. keys: of what it holds; None of a list or tuple. types: of what it holds.
        plain, plain_values: which of that are plain values, and what they are; `others`, `other_values`: likewise of
            objects that are compared by identity.
        tensors, counts, holders: places of those, the first two with the number of the tensor.
    """

    kind: type
    keys: tuple[Any, ...] | None
    types: list[type]
    plain: Values
    plain_values: Sequence[Any]
    others: Values
    other_values: Sequence[Any]
    tensors: list[tuple[int, int]]
    counts: list[tuple[int, int]]
    holders: list[int]

    def contents(self, value: Any) -> Sequence[Any] | None:
        """What an object of this class holds, in order; None where that is described otherwise."""
        if self.keys is None:
            values = tuple(value)
        else:
            items = value if self.kind is dict else value.__dict__
            if tuple(items) != self.keys:
                return None
            values = tuple(items.values())
        if list(map(type, values)) != self.types or self.plain(values) != self.plain_values:
            return None
        return values if all(map(operator.is_, self.others(values), self.other_values)) else None


@dataclass(frozen=True)
class Write:
    """Sets what a holder has under a key: a new tensor, one from before, a whole number or a value."""

    holder: int
    key: Any
    source: type  # of the description
    value: Any  # or the number of the tensor


class Template:
    """Of one description; `holders` are what it consists of, those of an outer one first."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.holders = shape, [*map(_holder, _compounds(shape.tree))]

    @classmethod
    def of(cls, shape: Shape) -> Template | None:
        """None where the description has what a template does not compare, such as an object in two places."""
        return cls(shape) if isinstance(shape.tree, Compound) and all(map(_simple, _compounds(shape.tree))) else None

    def read(self, value: Any) -> tuple[list[Any], list[Any]] | None:
        """The tensors of an object, and its holders; None where its description is another one."""
        if type(value) is not self.shape.tree.kind:
            return None
        holders: list[Any] = [value]
        tensors: list[Any] = [None] * len(self.shape.names)
        # What a holder holds is read after it, and so in the order of the description's compounds.
        for at, holder in enumerate(self.holders):
            values = holder.contents(holders[at])
            if values is None:
                return None
            for place, number in holder.tensors:
                tensors[number] = values[place]
            # A number that changes from call to call travels as the size of a tensor.
            for place, number in holder.counts:
                tensors[number] = counted(values[place])
            for place in holder.holders:
                holders.append(values[place])
        # In two places a walk describes an object once, and the second time as that one again.
        if len({*map(id, tensors), *map(id, holders)}) < len(tensors) + len(holders):
            return None
        return tensors, holders

    def writes(self, after: Shape) -> list[Write] | None:
        """What to set so that an object that was read is described so; None where that takes more than setting."""
        befores, afters = [self.shape.tree], [after.tree]
        writes: list[Write] = []
        for at, before in enumerate(befores):  # both grow, in the order of the holders
            now = afters[at]
            if not _alike(before, now):
                return None
            pairs = [(key, x, y) for (key, x), (_, y) in zip(before.items, now.items, strict=True)]
            inner = [(x, y) for _, x, y in pairs if isinstance(x, Compound)]
            befores += [x for x, _ in inner]
            afters += [y for _, y in inner]
            new = [_write(at, key, y) for key, x, y in pairs if not _stays(x, y)]
            # Nothing can be set in a tuple: `assign` makes another one.
            if None in new or (new and before.kind is tuple):
                return None
            writes += [write for write in new if write is not None]
        return writes

    @staticmethod
    def write(writes: Sequence[Write], holders: Sequence[Any], tensors: Sequence[Any], earlier: Sequence[Any]) -> None:
        """Set them.

        Args:
            holders, earlier: as they were read. tensors: what the object is to hold.
        """
        for write in writes:
            holder, value = holders[write.holder], write.value
            if write.source is TensorSlot:
                value = tensors[value]
            elif write.source is EarlierTensor:
                value = earlier[value]
            elif write.source is Count:
                size = tensors[value]
                value = size.shape[0] - SHIFT if isinstance(size, Tensor) else size
            (holder if isinstance(holder, list | dict) else holder.__dict__)[write.key] = value


def _compounds(tree: Any) -> list[Compound]:
    """A description's compounds, outer ones first."""
    out = [tree]
    for compound in out:  # it grows
        out += [x for _, x in compound.items if isinstance(x, Compound)]
    return out


def _simple(compound: Compound) -> bool:
    """Whether a template compares what is in it as a description does."""
    return all(isinstance(x, Compound | TensorSlot | Count) or _comparable(x) for _, x in compound.items)


def _comparable(x: Any) -> bool:
    """Whether a value that equals this one, of the same type, is described alike: not so 0.0 and -0.0, nor nan."""
    if not isinstance(x, Fixed):
        return False
    if isinstance(x.value, float):
        return x.value != 0 and not math.isnan(x.value)
    return not isinstance(x.value, complex)


def _holder(compound: Compound) -> Holder:
    keys, values = dict(compound.items), [x for _, x in compound.items]
    fixed = [at for at, x in enumerate(values) if isinstance(x, Fixed)]
    plain = [at for at in fixed if isinstance(values[at].value, PLAIN)]
    others = [at for at in fixed if at not in plain]
    return Holder(
        kind=compound.kind,
        keys=None if compound.kind in (list, tuple) else tuple(keys),
        types=[*map(_type, values)],
        plain=_values(plain),
        plain_values=tuple(values[at].value for at in plain),
        others=_values(others),
        other_values=tuple(values[at].value for at in others),
        tensors=[(at, x.index) for at, x in enumerate(values) if isinstance(x, TensorSlot)],
        counts=[(at, x.index) for at, x in enumerate(values) if isinstance(x, Count)],
        holders=[at for at, x in enumerate(values) if isinstance(x, Compound)],
    )


def _values(places: Sequence[int]) -> Values:
    """A function of a tuple that gives the tuple of what is at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _type(x: Any) -> type:
    if isinstance(x, Fixed):
        return type(x.value)
    if isinstance(x, Compound):
        return x.kind
    return int if isinstance(x, Count) else Tensor


def _alike(before: Compound, after: Any) -> bool:
    """Whether both are of one class and hold values under the same keys, compounds under those of compounds."""
    if not isinstance(after, Compound) or before.kind is not after.kind:
        return False
    keys = [(key, isinstance(x, Compound)) for key, x in before.items]
    return keys == [(key, isinstance(x, Compound)) for key, x in after.items]


def _stays(before: Any, after: Any) -> bool:
    """Whether what is there is right: a value that is the same, the tensor that was in its place, or what is within."""
    if isinstance(after, EarlierTensor):
        return isinstance(before, TensorSlot) and before.index == after.index
    return isinstance(after, Compound) or (isinstance(after, Fixed) and before == after)


def _write(holder: int, key: Any, after: Any) -> Write | None:
    """What puts this there; None where nothing is known to."""
    if isinstance(after, TensorSlot | EarlierTensor | Count):
        return Write(holder, key, type(after), after.index)
    return Write(holder, key, Fixed, after.value) if isinstance(after, Fixed) else None
