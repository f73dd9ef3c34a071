"""The arguments of one call: their leaves, the state among them, and the caller's objects after the call."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.errors import InputError
from autotp.inputs import Leaves, micro_batch
from autotp.ir.carried import (
    SHARED_TYPES,
    TENSOR_TYPES,
    Carried,
    Returned,
    Same,
    Shape,
    assign,
    is_carrier,
    rebuilt,
    states_of,
    write,
)

from .carriers import Carriers, Length, Reading

BATCH = (
    "{state} holds {have} sequences (dimension 0) and the input {name} has {want}: a state goes on with the sequences "
    "that it was made for. Pass as many, select the state's rows as those of the inputs were, or begin a new one."
)
LEAVES = SHARED_TYPES | TENSOR_TYPES  # classes of what is a leaf whatever it holds


class Arguments:
    """The arguments of one call.

    Attributes:
        flat, spec: the arguments as leaves, states as this rank's part.
        states: which of the leaves are states, by name.
        lengths: of those that are split the dimension, and the length of the whole there.
        state_objects: the caller's objects that hold state, each with its tensors; holders: what holds these in each.
        wrong: why a state cannot be this module's.
        entry: path of the module that is called.
        sequences: with context parallelism the whole sequences that were passed, of which the leaves are this rank's
            part; None where a part was passed.
        undealt: with context parallelism each of its ranks computes all of it, over tp alone.
    """

    sequences: list[Any] | None = None
    undealt: bool = False

    def __init__(self, carriers: Carriers, args: Leaves, kwargs: Mapping[str, Any], entry: str = "") -> None:
        self.carriers, self.args, self.kwargs, self.entry = carriers, args, kwargs, entry
        self.read()

    def read(self) -> None:
        """Read the arguments, again where more is known by now."""
        self.__dict__.pop("whole", None)
        self._shapes: list[tuple[int, ...] | None] | None = None
        self.wrong = ""
        self.lengths: dict[int, Length] = {}
        self.flat, reading = self._leaves()
        self.spec, self.states = reading.spec, reading.all_states
        unread = reading.states
        # As nearly always: then no state is looked at by itself.
        if unread and reading.fits(self.flat):
            unread, self.lengths = {}, dict(reading.lengths)
        for names, whole in ((unread, False), (reading.users, True)):
            for at, name in names.items():
                if isinstance(self.flat[at], Tensor):
                    self.flat[at], length, wrong = self.carriers.local(name, self.flat[at], whole)
                    self.wrong = self.wrong or wrong
                    if length is not None:
                        self.lengths[at] = length

    def _leaves(self) -> tuple[list[Any], Reading]:
        """Return the leaves, and their structure."""
        self.state_objects: list[tuple[Any, Carried]] = []
        self.holders: list[list[Any] | None] = []
        values, flat = [*self.args, *self.kwargs.values()], []
        # Calls whose arguments are leaves, and objects that are described alike, are nested alike.
        way: list[Any] = [self.entry, len(self.args), *self.kwargs]
        for at, value in enumerate(values):
            kind: Any = type(value)
            if is_carrier(value):
                carried, holders = self.carriers.described(value, self._name(at))
                values[at] = carried
                self.state_objects.append((value, carried))
                self.holders.append(holders)
                flat += carried.tensors
                kind = carried.shape
            elif kind in LEAVES:
                flat.append(value)
            else:
                kind = None  # what it holds is known when it is flat
            way.append(kind)
        flat_alone = None not in way
        reading = self.carriers.readings.get(tuple(way)) if flat_alone else None
        if reading is None:
            kwargs = dict(zip(self.kwargs, values[len(self.args) :], strict=True))
            flat, spec = compat.tree_flatten((tuple(values[: len(self.args)]), kwargs))
            reading = Reading(self.carriers, spec, states_of(spec) if self.state_objects else {}, self.entry)
            if flat_alone:
                self.carriers.remember(way, reading)
        return flat, reading

    def again(self, new: Mapping[int, Tensor]) -> Arguments:
        """Return the same call with other tensors in some of the leaves' places, of the same kinds."""
        call = copy.copy(self)
        call.__dict__.pop("whole", None)
        call._shapes, call.flat = None, [new.get(at, x) for at, x in enumerate(self.flat)]
        return call

    def _name(self, at: int) -> str:
        """Return the name of the argument at this place; arguments beyond the names are those of `*args`."""
        if at >= len(self.args):
            return list(self.kwargs)[at - len(self.args)]
        names = self.carriers.names_of(self.entry)
        return names[at] if at < len(names) else str(at)

    @cached_property
    def whole(self) -> list[Any]:
        """Leaves, each state as a tensor without memory of the whole's shape.

        A number (how many tokens a static cache holds) is whole anywhere, and stands for itself.
        """
        out = list(self.flat)
        for at in self.states:
            if isinstance(x := self.flat[at], Tensor) and x.ndim:
                out[at] = torch.empty(self.shapes[at] or (), dtype=x.dtype, device="meta")
        return micro_batch(out, self.carriers.micro_batches)

    @property
    def inputs(self) -> list[Any]:
        """Leaves that are no states."""
        return [x for at, x in enumerate(self.flat) if at not in self.states]

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """Shapes of all leaves, states whole; None for a leaf that is no tensor."""
        if self._shapes is None:
            leaves = self.flat if self.carriers.micro_batches == 1 else self.whole
            shapes: list[Any] = [getattr(x, "shape", None) for x in leaves]
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
        """Return the fault of a state that holds another number of sequences than the inputs; "" where all agree."""
        names = list(compat.named_leaves(compat.tree_unflatten(self.flat, self.spec)))
        tensors = {i: x for i, x in enumerate(self.whole) if isinstance(x, Tensor) and x.ndim > 1}
        inputs = {i: x.shape[0] for i, x in tensors.items() if i not in self.states and x.numel()}
        for i, x in tensors.items():
            if i in self.states and inputs and x.shape[0] not in inputs.values():
                at, want = next(iter(inputs.items()))
                return BATCH.format(state=self.states[i], have=x.shape[0], name=names[at], want=want)
        return ""

    def settle(self, results: Leaves, returns: Returns) -> Any:
        """Write the states into the caller's objects, and return the outputs.

        Args:
            results: of the program, without those that it writes in place. returns: their meaning.
        """
        if returns.plain:
            return compat.tree_unflatten(results, returns.outputs)
        objects = [self._object(i, *after, results) for i, after in enumerate(returns.after)]
        leaves: list[Any] = []
        for x in returns.leaves:
            if isinstance(x, Same):
                leaves.append(objects[x.index])
            elif isinstance(x, Carried):
                leaves.append(rebuilt(Carried(x.shape, self._of_caller(x.shape, x.tensors, results))))
            else:
                leaves.append(results[x])
        return compat.tree_unflatten(leaves, returns.outputs)

    def _object(self, number: int, shape: Shape, places: Sequence[int], results: Leaves) -> Any:
        """Return the caller's object of this number, as it is after the call."""
        (obj, was), holders = self.state_objects[number], self.holders[number]
        carried = Carried(shape, self._of_caller(shape, places, results))
        if holders is None or (writes := self.carriers.writes(was.shape, shape)) is None:
            return assign(obj, carried, was.tensors)
        write(writes, holders, carried, was.tensors)
        return obj

    def _of_caller(self, shape: Shape, places: Sequence[int], results: Leaves) -> list[Any]:
        of_caller = self.carriers.of_caller
        return [of_caller(name, results[at]) for name, at in zip(shape.names, places, strict=True)]


class Returns:
    """The meaning of the flat results of a program.

    Attributes:
        leaves: of the outputs: places of results, objects among the arguments, and others that hold state.
        outputs: how they are nested.
        after: of each object among the arguments its description after the call, and places of its tensors.
        plain: whether the results are the leaves.
    """

    def __init__(self, spec: compat.TreeSpec) -> None:
        outputs = compat.tree_unflatten(list(range(spec.num_leaves)), spec)
        self.plain, self.after, self.leaves = True, [], []
        if isinstance(outputs, Returned):
            self.plain, self.after = False, [(x.shape, x.tensors) for x in outputs.after]
            self.leaves, spec = compat.tree_flatten(outputs.outputs, is_leaf=lambda x: isinstance(x, Same | Carried))
        self.outputs = spec
