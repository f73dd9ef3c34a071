"""State that a model keeps between calls, as blocks of the whole: each rank has its part of a key/value cache.

A state that is split lies as the module's programs have it, and with dp each slice of the batch has its rows. On a
module that has not met it yet it is split as on the source.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotp.errors import InputError, StateError
from autotp.ir.carried import Carried, Shape, describe, is_carrier, rebuilt
from autotp.ir.layouts import Layout, Partition, Shard
from autotp.plans.pieces import Block
from autotp.runtime.checkpoint.dcpfiles import Tensors
from autotp.runtime.generation.carriers import Carriers
from autotp.runtime.storage import Box

PREFIX = "cache."
UNKNOWN = (
    "{name} is {how} on the source, and the target has not met it: how it will lie there is decided by the first call "
    "with it. Make one such call of the target before, as target.warmup(...) does."
)


@dataclass
class States:
    """Description of the objects that a rank of the source moves, beside their tensors.

    Attributes:
        objects: argument -> description of the object. moving: attributes whose whole numbers change.
        numbers: state that is a number -> the shape that carries it. layouts: of those that are split, and over how
            many ranks.
    """

    objects: dict[str, Shape] = field(default_factory=dict)
    moving: set[Any] = field(default_factory=set)
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: dict[str, tuple[Layout, int]] = field(default_factory=dict)


def collect(module: Any, objects: Mapping[str, Any]) -> tuple[Tensors, States]:
    """Return the tensors of state objects as blocks of the whole, and what else there is to say of these.

    Args:
        module: whose calls gave them. objects: by the name of the argument that takes each.

    Raises:
        InputError: one is no such object, or not this module's.
    """
    carriers, tensors = module._carriers, dict[str, Any]()
    states = States(moving=set(carriers.moving))
    for argument, value in objects.items():
        if not is_carrier(value):
            raise InputError(f"cache {argument!r} is {type(value).__name__}, no object with state that a call gave.")
        carried = describe(value, argument, carriers.moving)
        states.objects[argument] = carried.shape
        for i, (name, x) in enumerate(zip(carried.shape.names, carried.tensors, strict=True)):
            if i in carried.shape.counts:
                states.numbers[name] = tuple(x.shape)
                continue
            own, _, wrong = carriers.own(name, x)
            if wrong:
                raise InputError(wrong)
            tensors[PREFIX + name] = _boxes(carriers, name, own, _slice(module, own.ndim))
            layout = carriers.layouts.get(name)
            if layout is not None:
                states.layouts[name] = layout, carriers.tp
    return tensors, states


def begin(
    module: Any, states: States, entries: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, list[Box]], Callable[[], None]]:
    """Make the objects of a target.

    Args:
        module: that is to be called with them. states: what the source says. entries: of the whole tensors, by name.

    Returns: the objects, the boxes of theirs that are to be filled, and what lets the module know of them then.

    Raises:
        StateError: the module has not met a state, and how it lies there cannot be told.
        InputError: dp does not divide the batch.
    """
    # A copy, which learns: where another rank refuses, the module's own knows nothing of all this.
    carriers, objects, boxes = copy.deepcopy(module._carriers), dict[str, Any](), dict[str, list[Box]]()
    if not states.objects:
        return objects, boxes, lambda: None
    # A module that was never called with such an object would take each part for a whole.
    layouts = {}
    for name, (layout, tp) in states.layouts.items():
        if name not in carriers.layouts and layout.sharded_dim is not None:
            layouts[name] = _adopted(name, layout, tp, carriers.tp)
    carriers.learn_layouts(layouts)
    for argument, shape in states.objects.items():
        tensors: list[Tensor] = []
        for name in shape.names:
            # How many tokens a static cache has seen is a number, and comes with the description.
            if name in states.numbers:
                tensors.append(torch.empty(states.numbers[name], dtype=torch.uint8))
                continue
            # A number, or one for each sequence, is whole anywhere.
            if name not in carriers.layouts and carriers.tp > 1 and len(entries[PREFIX + name].shape) > 1:
                raise StateError(UNKNOWN.format(name=name, how="whole"))
            entry, slices = entries[PREFIX + name], _slice(module, len(entries[PREFIX + name].shape))
            shape_here = _local(carriers, name, entry.shape, slices[1])
            local = torch.empty(shape_here, dtype=entry.dtype, device=module._shards.device)
            boxes[PREFIX + name] = _boxes(carriers, name, local, slices)[1]
            tensors.append(carriers.of_caller(name, local))
        objects[argument] = rebuilt(Carried(shape, tensors))

    def learn() -> None:
        module._carriers.learn_layouts(layouts)
        module._carriers.moving |= states.moving

    return objects, boxes, learn


def _adopted(name: str, layout: Layout, before: int, tp: int) -> Layout:
    """A layout over `before` ranks for another number of ranks, where single elements are dealt."""
    partition, dim = layout.stored, layout.sharded_dim
    if partition is None or dim is None or not partition.is_plain(before):
        raise StateError(UNKNOWN.format(name=name, how=layout.words()))
    return Shard(dim, Partition.plain(partition.length, tp))


def _slice(module: Any, dims: int) -> tuple[int, int]:
    """Return this rank's slice of the batch, and how many there are; a vector or a number is no batch."""
    ranks = module._shards.ranks
    if dims < 2 or ranks is None or "dp" not in ranks.beside:
        return 0, 1
    return ranks.beside["dp"].rank, ranks.beside["dp"].tp


def _local(carriers: Carriers, name: str, shape: tuple[int, ...], slices: int) -> list[int]:
    """The shape of this rank's part of a whole state, of which there are so many slices of the batch."""
    size, cut = list(shape), carriers.cut(name)
    if cut is not None and cut.dim < len(shape):
        size[cut.dim] = cut.mine
    if size and size[0] % slices:
        raise InputError(f"{name} holds {size[0]} sequences, which dp={slices} does not divide.")
    return [size[0] // slices, *size[1:]] if size else size


def _boxes(carriers: Carriers, name: str, local: Tensor, slices: tuple[int, int]) -> tuple[tuple[int, ...], list[Box]]:
    """The shape of a whole state, and the blocks of it that this rank's part is."""
    cut, (place, count) = carriers.cut(name), slices
    whole, parts = list(local.shape), [Box((0,) * local.ndim, local)]
    if cut is not None and cut.dim < local.ndim:
        whole[cut.dim] = cut.length
        parts = [*_parts(carriers, name, local, cut.dim)]
    if count > 1:
        rows = whole[0]
        whole[0] = rows * count
        parts = [Box((box.offset[0] + place * rows, *box.offset[1:]), box.tensor) for box in parts]
    return tuple(whole), parts


def _parts(carriers: Carriers, name: str, local: Tensor, dim: int) -> Iterator[Box]:
    """The spans of a split state, which lie one after the other in this rank's part."""
    at = 0
    partition: Any = carriers.layouts[name].distribution
    for rank in range(carriers.rank, carriers.rank + carriers.own_ranks):
        for start, length in partition.spans(rank, carriers.tp):
            if length:
                block = Block.whole(tuple(local.shape)).span(dim, start, length)
                yield Box(block.offset, local.narrow(dim, at, length))
                at += length
