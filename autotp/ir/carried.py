"""Objects that hold a model's state between calls, such as a key/value cache, as tensors and a description.

An object among a call's arguments that is no container of tensors by itself is walked through its attributes, lists
and dictionaries. Its tensors become leaves of the call by their path; the rest is a `Shape` (classes, flags, numbers),
by which a program recognises it and from which an object of the same classes is made for a trace. What the object holds
after the forward is described in the same way, and set on the caller's own object.
"""

from __future__ import annotations

import enum
import itertools
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotp import compat

Attribute = tuple[type, str]  # a class, and the name of an attribute of its objects

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
SHIFT = 2  # a number n travels as a tensor of size [n + SHIFT, 0]: torch takes sizes of 0 and 1 for constants


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder of a tensor, by its index among those that the object holds."""

    index: int


@dataclass(frozen=True)
class Count:
    """Placeholder of a whole number that changes from call to call, by its index among the object's tensors."""

    index: int


@dataclass(frozen=True)
class Again:
    """Reference to what is held in another place too, by its number in the order of description."""

    index: int


@dataclass(frozen=True)
class EarlierTensor:
    """Placeholder of a tensor that the object held before the call, by its index among those."""

    index: int


@dataclass(frozen=True)
class Fixed:
    """A value that the program depends on; processes compare its `text`."""

    token: Hashable = field(repr=False)
    text: str
    value: Any = field(compare=False, repr=False)

    def __reduce__(self) -> Any:
        """Pickle the value for another process; of objects known by their identity only classes can be."""
        if isinstance(self.value, type):
            return _by_identity, (self.value,)
        if not isinstance(self.value, PLAIN_TYPES):
            raise PicklingError(f"a {self.text}, which is described by what this process knows it by")
        return _fixed, (self.value,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fixed:
        return self


class Compound(NamedTuple):
    """An object, list, tuple or dictionary: its class, and its items by name, place or key."""

    kind: type
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Shape:
    """Description of an object without its tensors; equal for objects that one program serves.

    Attributes:
        name: of the argument or output. tree: the description. names: of the tensors, in order.
        counts: which of the tensors are whole numbers.
    """

    name: str
    tree: object
    names: tuple[str, ...]
    counts: frozenset[int] = frozenset()

    def __hash__(self) -> int:
        return hash((self.name, self.names))

    def comparable(self) -> bool:
        """Return whether it can be compared between processes: nothing in it is known by its identity alone."""
        return _comparable(self.tree)


def classes(tree: Any) -> set[type]:
    """Collect the classes of the objects and containers in a description."""
    if not isinstance(tree, Compound):
        return set()
    return {tree.kind}.union(*(classes(x) for _, x in tree.items))


def _comparable(tree: Any) -> bool:
    if isinstance(tree, Compound):
        return all(_comparable(item) for _, item in tree.items)
    return not isinstance(tree, Fixed) or isinstance(tree.value, PLAIN_TYPES)


class Carried:
    """An object as its shape and tensors: a node of nested containers, whose leaves are the tensors."""

    def __init__(self, shape: Shape, tensors: Iterable[Any]) -> None:
        self.shape, self.tensors = shape, list(tensors)


def carried_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Carried]:
    """List the objects among the arguments of a call."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Carried)]


class Returned:
    """Results of a forward with such objects: its outputs, and each object among the arguments as it is afterwards."""

    def __init__(self, outputs: Any, after: Sequence[Carried]) -> None:
        self.outputs, self.after = outputs, list(after)


class Same:
    """Reference, in the outputs of a trace, to the n-th object among the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


compat.register_node(Carried, lambda x: (x.tensors, x.shape), lambda tensors, shape: Carried(shape, tensors))
compat.register_node(Returned, lambda x: ([x.outputs, x.after], None), lambda xs, _: Returned(*xs))
compat.register_node(Same, lambda x: ([], x.index), lambda _, index: Same(index))


def is_carrier(value: Any) -> bool:
    """Return whether a value is an object that may hold tensors, and that nested containers do not open.

    Transformers' caches are such objects also where somebody registered them as containers.
    """
    kind = type(value)
    return _opens(kind) and (not compat.registered(kind) or _is_cache(kind))


def _is_cache(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("transformers.cache_utils"), "Cache", ()))


@cache
def _opens(kind: type) -> bool:
    """Return whether objects of a class have attributes, and are no values, containers, functions or modules."""
    closed = (Tensor, Carried, Returned, Same, nn.Module, Mapping, list, tuple, set, frozenset, *PLAIN_TYPES, type)
    if issubclass(kind, (*closed, types.ModuleType, Callable)):  # type: ignore[arg-type]
        return False
    return any("__dict__" in vars(base) for base in kind.__mro__)


# A cache is described at every decoded token: equal parts of descriptions are one object, made once and compared fast.
TENSOR_TYPES = frozenset({Tensor, nn.Parameter})
SHARED_TYPES = frozenset({bool, int, str, type(None), torch.dtype, torch.device})  # not floats: 0.0 equals -0.0


def _fixed(value: Any) -> Fixed:
    return Fixed((type(value), value), repr(value), value)


def _by_identity(value: Any) -> Fixed:
    return Fixed((type(value), id(value)), type(value).__name__, value)


_shared = lru_cache(maxsize=4096, typed=True)(_fixed)


_slot, _count = lru_cache(maxsize=4096)(TensorSlot), lru_cache(maxsize=4096)(Count)


class Walk:
    """A description in the making; `moving` are the attributes whose whole numbers change, as (class, attribute)."""

    def __init__(self, moving: Iterable[Attribute], earlier: Sequence[Tensor]) -> None:
        self.moving = frozenset(moving)
        self.tensors: list[Any] = []
        self.names: list[str] = []
        self.counts: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.objects: list[Any] = []  # so that no id is used twice
        self.index_of = {id(t): i for i, t in enumerate(earlier)}

    def walk(self, value: Any, path: str, owner: type | None = None, name: str = "") -> Any:
        """Describe a value and note its tensors.

        Args:
            value: of an attribute or item, at `path`. owner, name: class and name of the attribute, where it is one.
        """
        kind = type(value)
        # How many tokens a cache has seen is 5, then 6: as a literal it would make each call another program.
        if (kind is int and (owner, name) in self.moving) or kind is torch.SymInt:
            self.counts.add(len(self.tensors))
            return _count(self._hold(counted(value), path))
        # Before identities: two attributes that are 0 are one object in Python, and share nothing.
        if kind in SHARED_TYPES:
            return _shared(value)
        tensor = isinstance(value, Tensor)
        if not tensor and isinstance(value, PLAIN_TYPES):
            return _fixed(value)
        # An object that two layers share is one afterwards as well, and one that holds itself ends here.
        if id(value) in self.numbers:
            return Again(self.numbers[id(value)])
        self.numbers[id(value)] = len(self.numbers)
        self.objects.append(value)
        if tensor:
            # A tensor that the call left as it was is no further output.
            earlier = self.index_of.get(id(value))
            return _slot(self._hold(value, path)) if earlier is None else EarlierTensor(earlier)
        if kind is list or kind is tuple:
            return self._compound(value, kind, enumerate(value), path)
        if kind is dict or is_carrier(value):
            return self._compound(value, kind, (value if kind is dict else vars(value)).items(), path)
        return _by_identity(value)

    def _compound(self, value: Any, kind: type, items: Iterable[tuple[Any, Any]], path: str) -> Compound:
        pairs, moving = [], self.moving
        for key, x in items:
            # Most of what a cache holds is flags and numbers, at every decoded token.
            plain = type(x) in SHARED_TYPES and not (moving and type(x) is int)
            pairs.append((key, _shared(x) if plain else self.walk(x, f"{path}.{key}", kind, str(key))))
        return Compound(kind, tuple(pairs))

    def _hold(self, tensor: Tensor, path: str) -> int:
        self.tensors.append(tensor)
        self.names.append(path)
        return len(self.tensors) - 1


class Skim:
    """An object as a flat key, its tensors, and their holders: in half a walk's time, once for every decoded token.

    Objects of equal keys have equal descriptions.

    Attributes:
        moving: attributes whose whole numbers change from call to call, as (class, attribute).
        holders: the objects, lists, tuples and dictionaries, outer ones first.
        twice: whether something is held in two places, which only a walk describes.
    """

    def __init__(self, value: Any, moving: Collection[Attribute]) -> None:
        self.moving, self.twice = moving, False
        self.parts: list[Any] = []
        self.tensors: list[Any] = []
        self.holders: list[Any] = []
        self._ids: set[int] = set()
        self._open(value, type(value))
        self.key = tuple(self.parts)

    def _open(self, holder: Any, kind: type) -> None:
        parts, ids, moving = self.parts, self._ids, self.moving
        ids.add(id(holder))
        self.holders.append(holder)
        if kind is list or kind is tuple:
            names, values = range(len(holder)), holder
        else:
            items = holder if kind is dict else holder.__dict__
            names, values = items.keys(), items.values()
        # Their number too: where one dictionary ends the next value's class would be a further key of it.
        parts += (kind, len(names), *names)
        for name, x in zip(names, values, strict=False):
            kind_of = type(x)
            # Before identities, as in a walk: two attributes that are 0 are one object in Python, and share nothing.
            if kind_of in SHARED_TYPES:
                # A number that is known to change is a size: as a value it would make each call another kind.
                if moving and kind_of is int and (kind, str(name)) in moving:
                    self.tensors.append(counted(x))
                    parts.append(Count)
                else:
                    parts += (kind_of, x)  # with its type: True equals 1
                continue
            tensor = kind_of in TENSOR_TYPES
            if not tensor and isinstance(x, PLAIN_TYPES):
                parts += (kind_of, repr(x))  # 0.0 is not -0.0
                continue
            # What is held twice is one object afterwards too, and what holds itself would never end.
            if id(x) in ids:
                self.twice = True
                return
            if tensor or isinstance(x, Tensor):
                ids.add(id(x))
                self.tensors.append(x)
                parts.append(Tensor)
            elif kind_of is list or kind_of is dict or kind_of is tuple or is_carrier(x):
                self._open(x, kind_of)
            else:
                ids.add(id(x))  # known by its identity: the description keeps it alive
                parts += (kind_of, id(x))


Writes = list[tuple[int, Any, Any]]  # index of a holder, the key in it, and the description of the value


def writes_between(before: Shape, after: Shape) -> Writes | None:
    """List what to set in an object's holders so that another description holds; None where setting is not enough."""
    writes: Writes = []
    numbers = itertools.count()

    def compare(old: Any, new: Any) -> bool:
        """Note what differs; return whether both have the same holders."""
        at, values = next(numbers), dict(new.items)
        if old.kind is not new.kind or [*dict(old.items)] != [*values]:
            return False
        for key, x in old.items:
            y = values[key]
            # Holders are numbered as they were read: another one among them would move all that follow.
            if isinstance(x, Compound) or isinstance(y, Compound | Again):
                if type(x) is not type(y) or not compare(x, y):
                    return False
            # A tensor that stays in its place is not set again.
            elif isinstance(y, TensorSlot | Count) or x != (_slot(y.index) if isinstance(y, EarlierTensor) else y):
                writes.append((at, key, y))
                if old.kind is tuple:  # nothing can be set in it
                    return False
        return True

    return writes if compare(before.tree, after.tree) else None


def write(writes: Writes, holders: Sequence[Any], carried: Carried, before: Sequence[Tensor]) -> None:
    """Set what an object holds after a call in its holders.

    Args:
        writes: by the descriptions before and after. holders: as they were read.
        carried: what it is to hold. before: the tensors that it held.
    """
    builder = Builder(carried, before)
    for at, key, x in writes:
        holder = holders[at]
        (holder if isinstance(holder, list | dict) else holder.__dict__)[key] = builder.value(x)


def counted(number: Any) -> Tensor:
    """Make an empty tensor that carries a whole number in its size."""
    return torch.empty((number + SHIFT, 0), dtype=torch.uint8)


def describe(value: Any, name: str, moving: Iterable[Attribute] = (), earlier: Sequence[Tensor] = ()) -> Carried:
    """Describe an object as its shape and tensors.

    Args:
        value: the object.
        name: of the argument or output that it is; the names of its tensors begin with it.
        moving: attributes whose whole numbers change from call to call, as (class, attribute).
        earlier: tensors that it held before the call; those are not held again.
    """
    walk = Walk(moving, earlier)
    tree = walk.walk(value, name)
    return Carried(Shape(name, tree, tuple(walk.names), frozenset(walk.counts)), walk.tensors)


def rebuilt(carried: Carried) -> Any:
    """Build a new object of the same classes that holds the tensors of `carried`; no constructor runs."""
    return Builder(carried).value(carried.shape.tree)


def assign(target: Any, carried: Carried, before: Sequence[Tensor]) -> Any:
    """Set what an object holds after a call on the caller's own object, and on the objects in it, in place.

    Args:
        target: the caller's object. carried: what it is to hold. before: the tensors that it held before the call.
    """
    return Builder(carried, before).value(carried.shape.tree, target)


class Builder:
    """Builder that makes or updates objects by a description."""

    def __init__(self, carried: Carried, before: Sequence[Tensor] = ()) -> None:
        self.tensors, self.before = carried.tensors, before
        self.objects: list[Any] = []

    def value(self, tree: Any, now: Any = None) -> Any:
        """Make what a description stands for; `now`, the present value, is updated where it is of that class."""
        if isinstance(tree, Fixed):
            if not isinstance(tree.value, PLAIN_TYPES):
                self.objects.append(tree.value)
            return tree.value
        if isinstance(tree, Count):
            size = self.tensors[tree.index]
            return size.shape[0] - SHIFT if isinstance(size, Tensor) else size
        if isinstance(tree, Again):
            return self.objects[tree.index]
        if isinstance(tree, TensorSlot | EarlierTensor):
            self.objects.append(self.tensors[tree.index] if isinstance(tree, TensorSlot) else self.before[tree.index])
            return self.objects[-1]
        return self._compound(tree, now)

    def _compound(self, tree: Compound, now: Any) -> Any:
        if tree.kind is tuple:
            at = len(self.objects)
            self.objects.append(None)
            old = now if isinstance(now, tuple) and len(now) == len(tree.items) else (None,) * len(tree.items)
            self.objects[at] = copy = tuple(self.value(x, was) for (_, x), was in zip(tree.items, old, strict=True))
            return copy
        copy: Any = now if type(now) is tree.kind else object_of(tree.kind)
        self.objects.append(copy)
        if tree.kind is list:
            old = [*copy, *[None] * len(tree.items)]
            copy[:] = [self.value(x, was) for (_, x), was in zip(tree.items, old, strict=False)]
            return copy
        holder = copy if tree.kind is dict else vars(copy)
        for key, x in tree.items:
            holder[key] = self.value(x, holder.get(key))
        return copy


def object_of(kind: Any) -> Any:
    """Make an object of a class without its constructor."""
    return kind.__new__(kind)


def changed_numbers(before: Any, after: Any, owner: Any = None, name: str = "") -> set[tuple[type, str, bool]]:
    """Collect the attributes whose whole numbers differ between two descriptions, or depend on sizes.

    Args:
        before, after: descriptions of one value. owner, name: class and name of its attribute.

    Returns: (class, attribute, whether it was there before, as a number that does not change).
    """
    number = isinstance(before, Fixed) and type(before.value) is int
    if isinstance(after, Count):
        return {(owner, name, number)}
    if isinstance(after, Fixed) and number and type(after.value) is int:
        return {(owner, name, True)} if before != after else set()
    if not isinstance(after, Compound):
        return set()
    was = dict(before.items) if isinstance(before, Compound) and before.kind is after.kind else {}
    return set().union(*(changed_numbers(was.get(key), x, after.kind, str(key)) for key, x in after.items))


def asked_sizes(before: Shape, after: Shape, sizes: Mapping[str, Sequence[Any]]) -> set[Attribute]:
    """Collect the attributes, as (class, attribute), whose numbers are sizes of a state that a call begins.

    Args:
        before, after: descriptions of the object. sizes: of the states after the call, by name.
    """

    def attributes(old: Any, new: Any) -> Iterator[Attribute]:
        if not isinstance(old, Compound) or not isinstance(new, Compound):
            return
        was = dict(old.items)
        numbers = {x.value: key for key, x in old.items if isinstance(x, Fixed) and type(x.value) is int}
        for key, x in new.items:
            yield from attributes(was.get(key), x)
            if isinstance(x, TensorSlot) and not isinstance(was.get(key), TensorSlot):
                lengths = [n for n in sizes.get(after.names[x.index], ())[1:] if isinstance(n, int) and n > 1]
                yield from ((new.kind, str(numbers[n])) for n in lengths if n in numbers)

    return set(attributes(before.tree, after.tree))


def replaced(tree: Any, function: Callable[[Any, str], Any]) -> Any:
    """Replace every object in nested containers that `is_carrier` says; `function` gets the object and its place."""
    leaves, spec = compat.tree_flatten(tree, is_leaf=is_carrier)
    if not any(is_carrier(x) for x in leaves):
        return tree
    new = []
    for name, x in compat.named_leaves(tree, is_carrier).items():
        new.append(function(x, name) if is_carrier(x) else x)
    return compat.tree_unflatten(new, spec)


def states_of(spec: compat.TreeSpec) -> dict[int, str]:
    """Map the leaves of a call or of its results that are states: position -> name."""
    names: dict[int, str] = {}
    tree = compat.tree_unflatten(list(range(spec.num_leaves)), spec)
    for x in compat.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Carried)):
        if isinstance(x, Carried):
            pairs = enumerate(zip(x.tensors, x.shape.names, strict=True))
            names |= {at: name for i, (at, name) in pairs if i not in x.shape.counts}
    return names
