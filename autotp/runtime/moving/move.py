"""`autotp.move`: weights, optimizer states and caches of a sharded module to another one, over any ranks of both.

State that a model keeps between calls, such as a key/value cache, moves as blocks of the whole: a state that is sharded
has the layout of the module's programs, and with dp each slice of the batch has its rows. On a module that has not met
it yet it is sharded as on the source.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from autotp.comm.ranks import PLAIN_PROCESS, Ranks, agree, from_all, together
from autotp.comm.turn import Turn, within
from autotp.errors import InputError, StateError
from autotp.ir.carried import Carried, Shape, describe, is_carrier, rebuilt
from autotp.ir.layouts import Layout, Partition, Shard
from autotp.plans.pieces import BUCKET, Block
from autotp.runtime import state
from autotp.runtime.checkpoint import optimizers
from autotp.runtime.checkpoint.archives import Peers, Tensors, match, under_own_names
from autotp.runtime.checkpoint.loading import boxes_of, settle
from autotp.runtime.checkpoint.saving import collect
from autotp.runtime.generation.carriers import Carriers
from autotp.runtime.storage import Box, ShardState

WHAT = ("weights", "optimizer", "cache")
CACHE = "cache."
UNKNOWN = (
    "{name} is {how} on the source, and the target has not met it: its layout there is decided by the first call "
    "with it. Make one such call of the target before, as target.warmup(...) does."
)
AXES = "source's and target's tp"  # as messages name the ranks


def move(
    source: Any, target: Any, what: Sequence[str] = WHAT, *,
    optimizer: tuple[Optimizer | None, Optimizer | None] | None = None, cache: Mapping[str, Any] | None = None,
    bucket: int = BUCKET, group: ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Give a sharded module the weights of another, and the states of its optimizer and caches. A collective call.

    Each byte that a rank lacks comes once, from a rank that has it; nothing is gathered. The two may have any meshes,
    over the same ranks, overlapping or disjoint ones. Where a rank fails or ends the source stays as it was.

    Args:
        source, target: sharded modules or pipes of one model; None on ranks that have no part of the one or the other.
        what: what is moved of that which is given: "weights", "optimizer", "cache".
        optimizer: the source's and the target's, each over the parameters that this rank has of it.
        cache: objects that calls of the source have filled, by the argument that takes them, such as
            `{"past_key_values": past}`; on ranks of the source.
        bucket: bytes of messages that a rank holds at once, beside source and target.
        group: the ranks that move, all of which call this; default: all that there are.

    Returns: the objects of `cache`, for calls of the target; empty on ranks that have no part of it.

    Raises:
        InputError: a rank has a part of neither, or not all of a module's ranks are there.
        StateError: the modules are of different models, types or optimizers: all differences are listed, and nothing
            was moved. It is within a call of a sharded module.
        RankError: that is so on another rank, or one has ended.
    """
    with Turn("autotp.move()"):
        if within():
            raise StateError(
                "autotp.move() within a call of a sharded module, as of a hook: what is under way reads the weights. "
                "Move between two calls. Nothing was moved."
            )
        modules = _module(source), _module(target)
        ranks = _ranks(group, modules)
        together(ranks, "reading the options", lambda: _check(what, modules))
        agree(ranks, "the options of a move", {"what": ", ".join(what), "bucket": bucket})
        _meet_sides(ranks, [module and module._shards for module in modules])
        with torch.no_grad():
            return carry(ranks, Sides(*modules, what, optimizer or (None, None), cache or {}), bucket)


def _check(what: Sequence[str], modules: Sequence[Any]) -> None:
    for module in modules:
        if module is not None and not _is_sharded(module):
            raise InputError(f"autotp.move() moves between sharded modules and pipes, and got {type(module).__name__}.")
    if isinstance(what, str) or not what or any(x not in WHAT for x in what):
        raise InputError(f"what={what!r}: give some of {', '.join(WHAT)}.")


def _is_sharded(module: Any) -> bool:
    return isinstance(getattr(module, "_shards", None), ShardState)


def _module(side: Any) -> Any:
    """Return the sharded module of a pipe, or the module itself."""
    return side if side is None or hasattr(side, "_shards") else getattr(side, "module", side)


def _ranks(group: ProcessGroup | None, modules: Sequence[Any]) -> Ranks:
    """Return the ranks that move."""
    if not (dist.is_available() and dist.is_initialized()):
        return PLAIN_PROCESS
    group = group or dist.group.WORLD
    assert group is not None
    devices = [x._shards.device for x in modules if _is_sharded(x)]
    device = devices[0] if devices else torch.device("cpu")
    return Ranks(None, dist.get_rank(group), dist.get_world_size(group), group, group.group_name, device, axes=AXES)


def _meet_sides(ranks: Ranks, shards: Sequence[ShardState | None]) -> None:
    """Refuse ranks that have no part of either module, and modules of which ranks are missing. A collective call."""
    if ranks.group is None:
        return
    members_of = [x and x.planners.group and dist.get_process_group_ranks(x.planners.group) for x in shards]
    everyone = from_all(ranks, members_of, "who moves")
    world = dist.get_process_group_ranks(ranks.group)
    for rank, sides in zip(world, everyone, strict=True):
        if not any(sides):
            raise InputError(
                f"rank {rank} has a part of neither source nor target. Give group= of the ranks that have one, and "
                "move on these alone. Nothing was moved."
            )
    for side, name in enumerate(("source", "target")):
        present = {rank for rank, sides in zip(world, everyone, strict=True) if sides[side]}
        members = {rank for sides in everyone for rank in sides[side] or ()}
        if not members or members - present:
            lack = (
                f"ranks {sorted(members - present)} have not given their part of it" if members else "no rank gave one"
            )
            raise InputError(f"autotp.move(): of the {name} {lack}. Nothing was moved.")


@dataclass(frozen=True)
class Sides:
    """The source and the target of a move on this rank, and what is moved between them.

    Attributes:
        source, target: sharded modules; None where this rank has no part of the one or the other.
        what: is moved of that which is given. optimizers: the source's and the target's. cache: objects of the source.
    """

    source: Any | None
    target: Any | None
    what: Sequence[str]
    optimizers: tuple[Optimizer | None, Optimizer | None]
    cache: Mapping[str, Any]

    def offer(self) -> tuple[Tensors, Any, States]:
        """Return the tensors of the source, notes of its optimizer, and the description of its caches."""
        if self.source is None:
            return {}, None, States()
        shards = self.source._shards
        state.refuse_meta(shards)
        optimizer = self.optimizers[0] if "optimizer" in self.what else None
        names = state.first_names(shards) if "weights" in self.what else ()
        tensors, notes = collect(shards, optimizer, None, names)
        states = States()
        if "cache" in self.what:
            caches, states = caches_of(self.source, self.cache)
            tensors |= caches
        return tensors, notes.get("optimizer"), states

    def request(self, peers: Peers, states: States) -> tuple[dict[str, Any], list[Callable[[], None]], dict[str, Any]]:
        """Return the target's boxes to fill, functions to call when they are filled, and the objects of its caches."""
        module, optimizer = self.target, self.optimizers[1] if "optimizer" in self.what else None
        if module is None:
            return {}, [], {}
        if (optimizer is None) != (peers.extra["optimizer"] is None):
            raise InputError("the states of an optimizer are moved where both sides have one: optimizer=(its, its).")
        shards, need, ends = module._shards, dict[str, Any](), list[Callable[[], None]]()
        if "weights" in self.what:
            archive, memory = under_own_names(shards, peers), dict[Tensor, Tensor]()
            need |= archive.below(boxes_of(shards, match(shards, archive, strict=True, cast=False), memory))
            ends.append(lambda: settle(shards, memory))
        if optimizer is not None:
            boxes, give = optimizers.begin(shards, optimizer, optimizers.matching(shards, optimizer, peers))
            need |= boxes
            ends.append(give)
        objects, boxes, learn = begin_caches(module, states, peers.entries)
        return need | boxes, [*ends, learn], objects


def carry(ranks: Ranks, sides: Sides, bucket: int) -> dict[str, Any]:
    """Move weights, states and caches in steps, in each of which all ranks fail together. A collective call.

    Args:
        ranks: that move. sides: this rank's part of both. bucket: bytes of messages that a rank holds at once.

    Returns: the objects of the caches of the target.
    """
    for module in (sides.source, sides.target):
        if module is not None:
            module._shards.show_own()
    if sides.source is not None:
        sides.source._shards.agree_on_writes("a move")
    tensors, *words = together(ranks, "reading the source", sides.offer)
    everyone: list[Any] = from_all(ranks, (bool(tensors), *words), "what the source has")
    notes = optimizers.joined([notes for present, notes, _ in everyone if present])
    states = next((states for *_, states in everyone if states.objects), States())
    peers = Peers.of(ranks, tensors, {"optimizer": notes}, bucket)
    need, ends, objects = together(ranks, "reading the target", lambda: sides.request(peers, states))
    peers.fill(need)
    together(ranks, "the end of a move", lambda: [end() for end in ends] and None)
    return objects


# ---- caches ----------------------------------------------------------------------------------------------------------


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


def caches_of(module: Any, objects: Mapping[str, Any]) -> tuple[Tensors, States]:
    """Return the tensors of state objects as blocks of the whole, and the description of the objects.

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
            local, _, wrong = carriers.local(name, x)
            if wrong:
                raise InputError(wrong)
            tensors[CACHE + name] = _boxes(carriers, name, local, _slice(module, local.ndim))
            layout = carriers.layouts.get(name)
            if layout is not None:
                states.layouts[name] = layout, carriers.tp
    return tensors, states


def begin_caches(
    module: Any, states: States, entries: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, list[Box]], Callable[[], None]]:
    """Make the objects of a target.

    Args:
        module: that is to be called with them. states: what the source says. entries: of the whole tensors, by name.

    Returns: the objects, their boxes to fill, and a function that tells the module of them then.

    Raises:
        StateError: the module has not met a state, and its layout there cannot be told.
        InputError: dp does not divide the batch.
    """
    # A copy, which learns: where another rank refuses, the module's own knows nothing of all this.
    carriers, objects, boxes = copy.deepcopy(module._carriers), dict[str, Any](), dict[str, list[Box]]()
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
            entry = entries[CACHE + name]
            # A number, or one for each sequence, is whole anywhere.
            if name not in carriers.layouts and carriers.tp > 1 and len(entry.shape) > 1:
                raise StateError(UNKNOWN.format(name=name, how="whole"))
            slices = _slice(module, len(entry.shape))
            size = _local(carriers, name, entry.shape, slices[1])
            local = torch.empty(size, dtype=entry.dtype, device=module._shards.device)
            _, boxes[CACHE + name] = _boxes(carriers, name, local, slices)
            tensors.append(carriers.of_caller(name, local))
        objects[argument] = rebuilt(Carried(shape, tensors))

    def learn() -> None:
        module._carriers.learn_layouts(layouts)
        module._carriers.moving |= states.moving

    return objects, boxes, learn


def _adopted(name: str, layout: Layout, before: int, tp: int) -> Layout:
    """Return a layout over `before` ranks for another number of ranks, where single elements are sharded."""
    partition, dim = layout.stored, layout.sharded_dim
    if partition is None or dim is None or not partition.is_plain(before):
        raise StateError(UNKNOWN.format(name=name, how=layout.words()))
    return Shard(dim, Partition.plain(partition.length, tp))


def _slice(module: Any, dims: int) -> tuple[int, int]:
    """Return this rank's slice of the batch, and how many there are; a vector or a number is no batch."""
    dp = module._shards.ranks.along("dp") if dims > 1 else PLAIN_PROCESS
    return dp.rank, dp.tp


def _local(carriers: Carriers, name: str, shape: tuple[int, ...], slices: int) -> list[int]:
    """Return the shape of this rank's part of a whole state, of which there are so many slices of the batch."""
    size, cut = list(shape), carriers.cut(name)
    if cut is not None and cut.dim < len(shape):
        size[cut.dim] = cut.mine
    if size and size[0] % slices:
        raise InputError(f"{name} holds {size[0]} sequences, which dp={slices} does not divide.")
    return [size[0] // slices, *size[1:]] if size else size


def _boxes(carriers: Carriers, name: str, local: Tensor, slices: tuple[int, int]) -> tuple[tuple[int, ...], list[Box]]:
    """Return the shape of a whole state, and the blocks of it that this rank's part is."""
    cut, (place, count) = carriers.cut(name), slices
    whole, block, boxes = list(local.shape), Block.whole(local.shape), [Box((0,) * local.ndim, local)]
    if cut is not None and cut.dim < local.ndim:
        partition: Any = carriers.layouts[name].distribution
        whole[cut.dim], at, boxes = cut.length, 0, []
        # The spans of a sharded state follow each other in this rank's part.
        for rank in range(carriers.rank, carriers.rank + carriers.own_ranks):
            for start, length in partition.spans(rank, carriers.tp):
                offset = block.span(cut.dim, start, length).offset
                boxes += [Box(offset, local.narrow(cut.dim, at, length))] if length else []
                at += length
    if count > 1:
        rows = whole[0]
        whole[0] = rows * count
        boxes = [Box((box.offset[0] + place * rows, *box.offset[1:]), box.tensor) for box in boxes]
    return tuple(whole), boxes
