"""`autotp.move`: weights, optimizer states and caches of a sharded module to another one, over any ranks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from autotp.comm.ranks import Ranks, agree, from_all, together
from autotp.comm.turn import Turn, within
from autotp.errors import InputError, StateError
from autotp.plans.pieces import BUCKET
from autotp.runtime import state
from autotp.runtime.checkpoint import optimizers
from autotp.runtime.checkpoint.archives import match, under_own_names
from autotp.runtime.checkpoint.dcpfiles import Tensors
from autotp.runtime.checkpoint.loading import memory_of
from autotp.runtime.checkpoint.peers import Holdings, Peers, holdings_of, receive
from autotp.runtime.checkpoint.saving import collect, first_names
from autotp.runtime.storage import Box, ShardState

from . import caches
from .caches import States

WHAT = ("weights", "optimizer", "cache")
AXES = "source's and target's tp"  # of whom messages speak


@dataclass
class Offer:
    """Tensors that a rank of the source gives: in numbers for all ranks, and its own memory.

    Attributes:
        holdings: in numbers. notes: of its optimizer. states: of its caches. boxes: its tensors, which are not sent.
    """

    holdings: Holdings = field(default_factory=dict)
    notes: Any = None
    states: States = field(default_factory=States)
    boxes: dict[str, list[Box]] = field(default_factory=dict)

    def add(self, tensors: Tensors) -> None:
        """Add tensors by name: the whole's shape, and this rank's boxes."""
        self.holdings |= holdings_of(tensors)
        self.boxes |= {name: boxes for name, (_, boxes) in tensors.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "boxes": {}}


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
        agree(ranks, "the options of a move", {"what": ", ".join(what), "bucket": str(bucket)})
        _meet_sides(ranks, [module and module._shards for module in modules])
        with torch.no_grad():
            return Move(ranks, *modules, what, optimizer or (None, None), cache or {})(bucket)


def _check(what: Sequence[str], modules: Sequence[Any]) -> None:
    for module in modules:
        if module is not None and not _is_sharded(module):
            raise InputError(f"autotp.move() moves between sharded modules and pipes, and got {type(module).__name__}.")
    if isinstance(what, str) or not what or any(x not in WHAT for x in what):
        raise InputError(f"what={what!r}: give some of {', '.join(WHAT)}.")


def _is_sharded(module: Any) -> bool:
    return isinstance(getattr(module, "_shards", None), ShardState)


def _module(side: Any) -> Any:
    """The sharded module of a pipe, or the one itself."""
    return side if side is None or hasattr(side, "_shards") else getattr(side, "module", side)


def _ranks(group: ProcessGroup | None, modules: Sequence[Any]) -> Ranks | None:
    """The ranks that move; None for one plain process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    assert group is not None
    devices = [x._shards.device for x in modules if _is_sharded(x)]
    device = devices[0] if devices else torch.device("cpu")
    nothing: Any = None
    return Ranks(nothing, dist.get_rank(group), dist.get_world_size(group), group, group.group_name, device, axes=AXES)


def _meet_sides(ranks: Ranks | None, shards: Sequence[ShardState | None]) -> None:
    """Refuse ranks that have no part of either, and modules of which not all ranks are there. A collective call."""
    if ranks is None:
        return
    own = [x and x.ranks and dist.get_process_group_ranks(x.ranks.planners.group) for x in shards]
    everyone = from_all(ranks, own, "who moves")
    world = dist.get_process_group_ranks(ranks.group)
    for rank, sides in zip(world, everyone, strict=True):
        if not any(sides):
            raise InputError(
                f"rank {rank} has a part of neither source nor target. Give group= of the ranks that have one, and "
                "move on these alone. Nothing was moved."
            )
    for side, name in enumerate(("source", "target")):
        there = {rank for rank, sides in zip(world, everyone, strict=True) if sides[side]}
        members = {rank for sides in everyone for rank in sides[side] or ()}
        if not members or members - there:
            lack = f"ranks {sorted(members - there)} have not given their part of it" if members else "no rank gave one"
            raise InputError(f"autotp.move(): of the {name} {lack}. Nothing was moved.")


@dataclass
class Move:
    """One move, step by step, in each of which all ranks fail together."""

    ranks: Ranks | None
    source: Any
    target: Any
    what: Sequence[str]
    optimizer: tuple[Optimizer | None, Optimizer | None]
    cache: Mapping[str, Any]

    def __call__(self, bucket: int) -> dict[str, Any]:
        """Do it."""
        ranks = self.ranks
        for module in (self.source, self.target):
            if module is not None:
                module._shards.show_own()
        if self.source is not None:
            self.source._shards.agree_on_writes("a move")
        own = together(ranks, "reading the source", self._offer)
        everyone = from_all(ranks, own, "what the source has")
        peers, states = self._peers(everyone)
        need, finish, objects = together(ranks, "reading the target", lambda: self._request(peers, states))
        receive(peers, own.boxes, need, ranks, bucket)
        together(ranks, "the end of a move", finish)
        return objects

    def _offer(self) -> Offer:
        out, module = Offer(), self.source
        if module is None:
            return out
        shards: ShardState = module._shards
        state.refuse_meta(shards)
        optimizer = self.optimizer[0] if "optimizer" in self.what else None
        names = first_names(shards) if "weights" in self.what else ()
        tensors, notes = collect(shards, optimizer, None, names)
        out.add(tensors)
        out.notes = notes.get("optimizer")
        if "cache" in self.what:
            tensors, out.states = caches.collect(module, self.cache)
            out.add(tensors)
        return out

    def _peers(self, everyone: Sequence[Offer]) -> tuple[Peers, States]:
        """All that the source's ranks give, as of one."""
        notes = optimizers.joined([x.notes for x in everyone if x.holdings])
        states = next((x.states for x in everyone if x.states.objects), States())
        return Peers([x.holdings for x in everyone], {"optimizer": notes}), states

    def _request(self, peers: Peers, states: States) -> tuple[dict[str, list[Box]], Callable[[], None], dict[str, Any]]:
        """This rank's boxes to fill, what is to be done when they are, and the objects of its caches."""
        module, optimizer = self.target, self.optimizer[1] if "optimizer" in self.what else None
        if module is None:
            return {}, lambda: None, {}
        if (optimizer is None) != (peers.extra["optimizer"] is None):
            raise InputError("the states of an optimizer are moved where both sides have one: optimizer=(its, its).")
        shards: ShardState = module._shards
        need, finish = self._weights(shards, peers) if "weights" in self.what else ({}, lambda: None)
        ends = [finish]
        if optimizer is not None:
            boxes, give = optimizers.begin(shards, optimizer, optimizers.matching(shards, optimizer, peers))
            need |= boxes
            ends.append(give)
        objects, boxes, learn = caches.begin(module, states, peers.entries)
        ends.append(learn)

        def finish_all() -> None:
            for end in ends:
                end()

        return need | boxes, finish_all, objects

    def _weights(self, shards: ShardState, peers: Peers) -> tuple[dict[str, list[Box]], Callable[[], None]]:
        """The boxes of the target's weights by the source's names, and what is to be done when they are filled."""
        archive: Any = under_own_names(shards, peers)
        need: dict[str, list[Box]] = {}
        replacements: dict[Tensor, Tensor] = {}
        for first, names in match(shards, archive, strict=True, cast=False).stored.items():
            tensors = memory_of(shards, state.pieces(shards, first), replacements)
            need[archive.stored[names[0]]] = shards.storage_of(first).boxes(tensors)

        def finish() -> None:
            if replacements:
                state.install(shards, replacements)
            shards.loaded()

        return need, finish
