"""Objects that hold state between calls, such as a key/value cache, in the calls of a sharded module.

The caller's object stays the same, and holds this rank's tensors: code that reorders, crops or selects rows acts
on them. A call is recognised by the object's shape and sizes; afterwards the program's states are set on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from autotp import compat
from autotp.comm.virtual import Hosts
from autotp.inputs import Leaves
from autotp.ir.carried import (
    Carried,
    Returned,
    Shape,
    Skim,
    Writes,
    asked_sizes,
    changed_numbers,
    describe,
    writes_between,
)
from autotp.ir.graph import Capture, placed_outputs, resolve, tensors
from autotp.ir.layouts import Layout, Layouts
from autotp.ir.named_states import places_of
from autotp.ir.op import sizes

MAX_KEPT = 64  # descriptions of objects, and ways of calling one module
FOREIGN = (
    "{name} has {have} of {whole} in dimension {dim}, and this rank's part of it are {mine}: this state was made by "
    "the unsharded model, or under another plan. Pass what this module gave."
)


Length = tuple[int, int]  # a dimension, and how long a whole state is there


class Cut(NamedTuple):
    """The dimension that a state is split in, and its length there: on this rank, and of the whole."""

    dim: int
    mine: int
    length: int


class Reading:
    """Structure of the leaves of calls that are nested alike.

    Attributes:
        spec: how they are nested. states, users: places of the states of objects, and of those that the user named.
        cuts: places of states that are sharded, and how; lengths: as a call's where all of them fit.
    """

    def __init__(self, carriers: Carriers, spec: compat.TreeSpec, states: dict[int, str], entry: str) -> None:
        self.spec, self.states, self.users = spec, states, carriers.named_places(spec, entry)
        self.all_states = {**self.states, **self.users}
        pairs = [(at, carriers.cut(name)) for at, name in states.items()]
        self.cuts = [(at, cut) for at, cut in pairs if cut is not None]
        self.lengths = {at: (cut.dim, cut.length) for at, cut in self.cuts}

    def fits(self, flat: Leaves) -> bool:
        """Return whether every state that is sharded is this rank's part, and not empty."""
        for at, (dim, mine, _) in self.cuts:
            state = flat[at]
            if state.ndim <= dim or state.size(dim) != mine or not mine:
                return False
        return True


@dataclass
class Carriers:
    """Knowledge that a sharded module has of the objects that it is given.

    Attributes:
        names: of the positional arguments; those of other modules' calls are asked of `bare`, the skeleton.
        rank, tp: this rank among how many; own_ranks: virtual ranks of this process, of which it is the first.
        layouts: of the states that programs have met, by name.
        sizes: (state, dimension) -> its size where all programs left the same number there, else None.
        moving: attributes whose whole numbers change from call to call, as (class, attribute).
        state_names: arguments that the user named as states.
        kinds: classes in the objects of calls that were captured.
        micro_batches: virtual ones of this process; a call is known by the sizes of one.
    """

    names: tuple[str, ...]
    rank: int = 0
    tp: int = 1
    own_ranks: int = 1
    layouts: dict[str, Layout] = field(default_factory=dict)
    moving: set[tuple[type, str]] = field(default_factory=set)
    sizes: dict[tuple[str, int], int | None] = field(default_factory=dict)
    state_names: tuple[str, ...] = ()
    kinds: set[type] = field(default_factory=set)
    bare: Any = None
    micro_batches: int = 1
    cuts: dict[str, tuple[Layout | None, Cut | None]] = field(default_factory=dict)
    shapes: dict[Any, Shape] = field(default_factory=dict)  # descriptions of objects, by what is skimmed of them
    writings: dict[Any, tuple[Shape, Shape, Writes | None]] = field(default_factory=dict)  # by descriptions
    readings: dict[Any, Reading] = field(default_factory=dict)  # by ways of calling

    @classmethod
    def of(
        cls, bare: nn.Module, rank: int = 0, tp: int = 1, state_names: tuple[str, ...] = (), hosts: Hosts = (),
        layouts: Layouts = MappingProxyType({}),
    ) -> Carriers:  # fmt: skip
        """Make those of a module of which this is the skeleton."""
        parameters = tuple(inspect.signature(bare.forward).parameters)
        *_, batch, local = 1, 1, *(host.local for host in hosts)
        return cls(parameters, rank, tp, local, dict(layouts), state_names=state_names, bare=bare, micro_batches=batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carriers:
        fresh: dict[str, Any] = {"layouts": dict(self.layouts), "moving": set(self.moving), "sizes": dict(self.sizes)}
        fresh["kinds"] = set(self.kinds)
        return replace(self, **fresh, cuts={}, shapes={}, writings={}, readings={})

    def named_places(self, spec: Any, entry: str = "") -> dict[int, str]:
        """Return the places of the model's named states in the leaves of a call of the module at this path."""
        return places_of(self.bare.forward, spec, self.state_names) if self.state_names and not entry else {}

    def names_of(self, entry: str) -> tuple[str, ...]:
        """Return the names of the arguments of the module at this path."""
        return tuple(inspect.signature(self.bare.get_submodule(entry).forward).parameters) if entry else self.names

    def described(self, value: Any, name: str) -> tuple[Carried, list[Any] | None]:
        """Return an object as its tensors, under one description for all equal ones, and the holders of the tensors.

        Args:
            value: the object. name: of the argument that it is.

        Returns: None in the place of the holders where only a walk describes it.
        """
        skim = Skim(value, self.moving)
        if skim.twice:
            return describe(value, name, self.moving), None
        shape = self.shapes.get((name, skim.key))
        if shape is None:
            shape = describe(value, name, self.moving).shape
            _remember(self.shapes, (name, skim.key), shape)
        return Carried(shape, skim.tensors), skim.holders

    def writes(self, before: Shape, after: Shape) -> Writes | None:
        """List the writes that turn an object of one description into the other; None where `assign` has to do it."""
        pair = id(before), id(after)
        if pair not in self.writings:  # which keeps the descriptions alive, and so their ids
            _remember(self.writings, pair, (before, after, writes_between(before, after)))
        return self.writings[pair][2]

    def remember(self, way: Sequence[Any], reading: Reading) -> None:
        """Remember how calls that are made in this way are read."""
        _remember(self.readings, tuple(way), reading)

    def foresee(self, before: Sequence[Carried], after: Sequence[Carried], others: Collection[int]) -> bool:
        """Take note of numbers that change from call to call as a call on fake tensors shows them, before it is traced.

        Args:
            before, after: the objects of the call. others: sizes of its inputs, which an object's number may equal by
                chance.

        Returns: whether the call must be read again.
        """
        lengths: dict[str, Sequence[Any]] = {}
        for x in after:
            for name, tensor in zip(x.shape.names, x.tensors, strict=True):
                lengths[name] = [0, *(n for n in tensor.shape[1:] if n not in others)]
        pairs = [(x.shape, y.shape) for x, y in zip(before, after, strict=True)]
        return self._note(pairs, lengths)

    def learn(self, captured: Capture) -> bool:
        """Take note of numbers that a capture shows to change from call to call.

        Returns: whether the captured call had one of them as it was, so that it must be read again.
        """
        args, kwargs = compat.tree_unflatten([None] * captured.in_spec.num_leaves, captured.in_spec)
        before = [x for x in (*args, *kwargs.values()) if isinstance(x, Carried)]
        returned = compat.tree_unflatten([None] * captured.out_spec.num_leaves, captured.out_spec)
        if not isinstance(returned, Returned):
            return False
        pairs = [(x.shape, y.shape) for x, y in zip(before, returned.after, strict=True)]
        return self._note(pairs, self._measure(captured))

    def _note(self, pairs: Sequence[tuple[Shape, Shape]], state_sizes: Mapping[str, Sequence[Any]]) -> bool:
        """Take note of numbers that a call changes in objects, or that are the lengths of states."""
        counters = set().union(*(changed_numbers(x.tree, y.tree) for x, y in pairs))
        # The length of a static cache is a number of the caller's, and another in the next call.
        counters |= {(*counter, True) for x, y in pairs for counter in asked_sizes(x, y, state_sizes)}
        new = {(owner, name) for owner, name, _ in counters} - self.moving
        self.moving |= new
        return any(was and (owner, name) in new for owner, name, was in counters)

    def learn_layouts(self, states: Layouts) -> None:
        """Take note of the layouts of a program's states; calls are read anew with that."""
        self.layouts |= states
        self.readings.clear()

    def _measure(self, captured: Capture) -> dict[str, Sequence[Any]]:
        """Take note of the sizes that states are left with, where some size of the state is not a number.

        Returns: the sizes of all, by name.
        """
        state_sizes = {}
        for position, node in placed_outputs(captured):
            name = captured.becomes(position)
            if name is None:
                continue
            maker, index = resolve(node)
            state_sizes[name] = shape = sizes(tensors(maker)[index])
            if any(not isinstance(n, int) for n in shape):
                for d, n in enumerate(shape):
                    number = n if d and isinstance(n, int) and n > 1 else None  # of 0 and 1 torch makes numbers
                    before = self.sizes.setdefault((name, d), number)
                    self.sizes[name, d] = number if before == number else None
        return state_sizes

    def cut(self, name: str) -> Cut | None:
        """Return how a state is sharded; None where it is whole. Remembered, as every step asks for every state."""
        layout = self.layouts.get(name)
        entry = self.cuts.get(name)
        if entry is None or entry[0] is not layout:
            self.cuts[name] = entry = layout, self._cut(layout)
        return entry[1]

    def _cut(self, layout: Layout | None) -> Cut | None:
        if layout is None or layout.sharded_dim is None or layout.distribution is None or self.tp == 1:
            return None
        partition = layout.distribution
        mine = sum(int(partition.local(self.rank + i, self.tp)) for i in range(self.own_ranks))
        return Cut(layout.sharded_dim, mine, int(partition.length))

    def local(self, name: str, tensor: Tensor, whole: bool = False) -> tuple[Tensor, Length | None, str]:
        """Return this rank's part of a state as its program takes it, the whole's length, and its fault or "".

        Args:
            name, tensor: of the state. whole: it may be passed whole, as one that the user named.
        """
        split = self.cut(name)
        if split is None or split.dim >= tensor.ndim:
            return tensor, None, ""
        dim, mine, length = split
        have = tensor.shape[dim]
        if whole and have == length:
            tensor = self.layouts[name].to_runtime().take(tensor, self.rank, self.tp)
        elif have not in (mine, max(mine, 1)):
            return tensor, None, FOREIGN.format(name=name, have=have, whole=length, dim=dim, mine=mine)
        return tensor if mine else tensor.narrow(dim, 0, 0), (dim, length), ""

    def of_caller(self, name: str, tensor: Any) -> Any:
        """Return a part as the caller's object holds it: one row of zeros, without memory, where it is empty.

        An empty tensor means to many that there is no state yet.
        """
        if not isinstance(tensor, Tensor) or tensor.numel():  # as nearly always: no layout is asked for
            return tensor
        split = self.cut(name)
        if split is None or tensor.size(split.dim):
            return tensor
        shape = [*tensor.shape[: split.dim], 1, *tensor.shape[split.dim + 1 :]]
        return tensor.new_zeros(()).expand(shape)


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Put an entry into a table, which begins anew where it is full."""
    if len(table) >= MAX_KEPT:
        table.clear()
    table[key] = value
