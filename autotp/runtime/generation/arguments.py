"""The arguments of one call: their leaves, the state among them, and what the caller's objects hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.errors import InputError
from autotp.ir.carried import SHARED, Carried, Returned, Same, Shape, assign, rebuilt, states_of

from .carrying import CarriedPairs, Carriers, Cut, Length
from .outputs import Outputs
from .template import Template, Write

BATCH = (
    "{state} holds {have} sequences (dimension 0) and the input {name} has {want}: a state goes on with the sequences "
    "that it was made for. Pass as many, select the state's rows as those of the inputs were, or begin a new one."
)
LEAVES = SHARED | {Tensor, nn.Parameter}  # classes of what is a leaf whatever it holds
READINGS = 64  # ways of calling one module


@dataclass
class Reading:
    """How the arguments of a call were read: the next call of the same objects, described alike, is read so.

    Attributes:
        parts: of each argument the template of an object that holds state; None of a leaf.
        spec: how the leaves are nested. states, users: where in them states lie, of objects and that the user named.
        moving: how many attributes were known to change from call to call.
        writes: what a call sets on an object, by the descriptions before and after.
        cuts: where in the leaves states of objects are split, and how; `lengths` as a call's where all are so.
    """

    parts: list[Template | None]
    spec: compat.TreeSpec
    states: Mapping[int, str]
    users: Mapping[int, str]
    moving: int
    writes: dict[tuple[int, int], tuple[Shape, Shape, list[Write] | None]]
    cuts: list[tuple[int, Cut]] = field(default_factory=list)
    lengths: dict[int, Length] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_states = {**self.states, **self.users}

    def cut(self, carriers: Carriers) -> None:
        """Take note of how the states of objects are split."""
        pairs = [(at, carriers.cut(name)) for at, name in self.states.items()]
        self.cuts = [(at, split) for at, split in pairs if split is not None]
        self.lengths = {at: (split.dim, split.length) for at, split in self.cuts}

    def fits(self, flat: Sequence[Any]) -> bool:
        """Whether of every state that is split there is this rank's part, and something in it."""
        for at, (dim, mine, _) in self.cuts:
            state = flat[at]
            if state.ndim <= dim or state.size(dim) != mine or not mine:
                return False
        return True

    def read(self, values: Sequence[Any]) -> tuple[list[Any], CarriedPairs, list[list[Any]]] | None:
        """The leaves, the objects with their tensors, and their holders; None where a walk must look at them."""
        flat: list[Any] = []
        pairs: CarriedPairs = []
        holders = []
        for value, part in zip(values, self.parts, strict=True):
            if part is None:
                if type(value) not in LEAVES:
                    return None
                flat.append(value)
                continue
            result = part.read(value)
            if result is None:
                return None
            flat += result[0]
            pairs.append((value, Carried(part.shape, result[0])))
            holders.append(result[1])
        return flat, pairs, holders

    def writes_to(self, number: int, after: Shape) -> list[Write] | None:
        """What makes the object of this number one that is described so; None where `assign` is to."""
        key = number, id(after)
        before = [part for part in self.parts if part is not None][number]
        if key not in self.writes:
            if len(self.writes) >= READINGS:
                self.writes.clear()
            self.writes[key] = before.shape, after, before.writes(after)  # which keeps the description, and so its id
        return self.writes[key][2]


class Arguments:
    """The arguments of one call.

    Attributes:
        flat, spec: the arguments as leaves, states as this rank's part.
        states: which of the leaves are states, by name.
        lengths: of those that are split the dimension, and the length of the whole there.
        state_objects: the caller's objects that hold state, each with its tensors.
        wrong: why a state cannot be this module's.
        entry: path of the module that is called.
        sequences: with context parallelism the whole sequences that were passed, of which the leaves are this rank's
            part; None where a part was passed.
    """

    sequences: list[Any] | None = None

    def __init__(self, carriers: Carriers, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str = "") -> None:
        self.carriers, self.args, self.kwargs, self.entry = carriers, args, kwargs, entry
        # How the module is called, and with what kinds of objects: two classes of caches are read by turns.
        self._way = (entry, len(args), *kwargs, *map(type, args), *map(type, kwargs.values()))
        self.read()

    def read(self) -> None:
        """Read the arguments, again where more is known by now."""
        self.wrong, self.lengths = "", {}
        self.__dict__.pop("whole", None)
        self._shapes: list[tuple[int, ...] | None] | None = None
        self.holders: list[list[Any]] = []
        self.reading = self._as_before() or self._walk()
        self.states = self.reading.all_states
        own = self.reading.states
        if self.holders and self.reading.fits(self.flat):
            own, self.lengths = {}, dict(self.reading.lengths)
        for names, take in ((own, self.carriers.own), (self.reading.users, self.carriers.part)):
            for at, name in names.items():
                if isinstance(self.flat[at], Tensor):
                    self.flat[at], length, wrong = take(name, self.flat[at])
                    self.wrong = self.wrong or wrong
                    if length is not None:
                        self.lengths[at] = length

    def _as_before(self) -> Reading | None:
        """How such a call was read, where that reads this one too."""
        reading = self.carriers.readings.get(self._way)
        if reading is None or reading.moving != len(self.carriers.moving):
            return None
        result = reading.read((*self.args, *self.kwargs.values()))
        if result is None:
            return None
        self.flat, self.state_objects, self.holders = result
        self.spec = reading.spec
        return reading

    def _walk(self) -> Reading:
        """Read the arguments whatever they are."""
        args, kwargs, self.state_objects = self.carriers.as_tensors(self.args, self.kwargs, self.entry)
        self.flat, self.spec = compat.tree_flatten((args, kwargs))
        states = states_of(self.spec) if self.state_objects else {}
        users = self.carriers.named_places(self.spec, self.entry)
        reading = Reading([], self.spec, states, users, len(self.carriers.moving), {})
        if self.state_objects:
            shapes = {id(value): carried.shape for value, carried in self.state_objects}
            for value in (*self.args, *self.kwargs.values()):
                part = Template.of(shapes[id(value)]) if id(value) in shapes else None
                if part is None and type(value) not in LEAVES:
                    return reading
                reading.parts.append(part)
            reading.cut(self.carriers)
            if len(self.carriers.readings) >= READINGS:
                self.carriers.readings.clear()
            self.carriers.readings[self._way] = reading
        return reading

    @cached_property
    def whole(self) -> list[Any]:
        """The same leaves, in place of states tensors without memory that have the whole's shape.

        A number (how many tokens a static cache holds) is whole anywhere, and stands for itself.
        """
        out = list(self.flat)
        for at in self.states:
            if isinstance(x := self.flat[at], Tensor) and x.ndim:
                out[at] = torch.empty(self.shapes[at] or (), dtype=x.dtype, device="meta")
        return out

    @property
    def inputs(self) -> list[Any]:
        """The leaves that are no states."""
        return [x for at, x in enumerate(self.flat) if at not in self.states]

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """Of all leaves, states whole; None of what is no tensor."""
        if self._shapes is None:
            shapes: list[Any] = [getattr(x, "shape", None) for x in self.flat]
            for at, (dim, length) in self.lengths.items():
                shapes[at] = (*shapes[at][:dim], length, *shapes[at][dim + 1 :])
            self._shapes = shapes
        return self._shapes

    def check(self) -> None:
        """Refuse a state that is not this module's.

        Raises:
            InputError: it says which.
        """
        if self.wrong:
            raise InputError(self.wrong)

    def other_batch(self) -> str:
        """Which state holds another number of sequences than the inputs, as words; "" where all hold as many."""
        names = list(compat.named_leaves(compat.tree_unflatten(self.flat, self.spec)))
        tensors = {i: x for i, x in enumerate(self.whole) if isinstance(x, Tensor) and x.ndim > 1}
        inputs = {i: x.shape[0] for i, x in tensors.items() if i not in self.states and x.numel()}
        for i, x in tensors.items():
            if i in self.states and inputs and x.shape[0] not in inputs.values():
                at, want = next(iter(inputs.items()))
                return BATCH.format(state=self.states[i], have=x.shape[0], name=names[at], want=want)
        return ""

    def settle(self, results: Sequence[Any], returns: Returns) -> Any:
        """The outputs, after the caller's objects hold what they hold after the call.

        Args:
            results: of the program, without what it writes. returns: what they are.
        """
        if returns.plain:
            return returns.outputs.of(results)
        objects = [self._object(i, *after, results) for i, after in enumerate(returns.after)]
        leaves: list[Any] = []
        for x in returns.leaves:
            if isinstance(x, Same):
                leaves.append(objects[x.index])
            elif isinstance(x, Carried):
                leaves.append(rebuilt(Carried(x.shape, self._of_caller(x.shape, x.tensors, results))))
            else:
                leaves.append(results[x])
        return returns.outputs.of(leaves)

    def _object(self, number: int, shape: Shape, places: Sequence[int], results: Sequence[Any]) -> Any:
        """The caller's object of this number, as it is after the call."""
        (obj, was), tensors = self.state_objects[number], self._of_caller(shape, places, results)
        writes = self.reading.writes_to(number, shape) if self.holders else None
        if writes is None:
            return assign(obj, Carried(shape, tensors), was.tensors)
        Template.write(writes, self.holders[number], tensors, was.tensors)
        return obj

    def _of_caller(self, shape: Shape, places: Sequence[int], results: Sequence[Any]) -> list[Any]:
        of_caller = self.carriers.of_caller
        return [of_caller(name, results[at]) for name, at in zip(shape.names, places, strict=True)]


class Returns:
    """What the flat results of a program are.

    Attributes:
        leaves: of the outputs: places of results, objects among the arguments, and others that hold state.
        outputs: makes them of their leaves.
        after: of each object among the arguments its description after the call, and places of its tensors.
        plain: whether the results are the leaves.
    """

    def __init__(self, spec: compat.TreeSpec) -> None:
        outputs = compat.tree_unflatten(list(range(spec.num_leaves)), spec)
        after = outputs.after if isinstance(outputs, Returned) else []
        self.after = [(x.shape, x.tensors) for x in after]
        self.plain, self.leaves = not isinstance(outputs, Returned), []
        if isinstance(outputs, Returned):
            self.leaves, spec = compat.tree_flatten(outputs.outputs, is_leaf=lambda x: isinstance(x, Same | Carried))
        self.outputs = Outputs(spec)
