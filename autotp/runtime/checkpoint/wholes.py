"""Whole tensors of a sharded module, brought together a few at a time where they are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from autotp.comm.ranks import Ranks, agree, together
from autotp.errors import InputError
from autotp.ir.graph import NamedTensors
from autotp.plans.pieces import BUCKET
from autotp.runtime import state
from autotp.runtime.storage import Box, ShardState

from .archives import reverted
from .peers import Peers

NAMES = ("huggingface", "original")


class Wholes:
    """The tensors of a module's state dict, of all stages, by first names. To make it is a collective call.

    Args:
        shards: of the module. ranks: of all its axes; None in one plain process.
    """

    def __init__(self, shards: ShardState, ranks: Ranks | None) -> None:
        self.shards = shards
        firsts = dict.fromkeys(first for _, first in state.named_tensors(shards))
        tensors = {first: (shards.storage_of(first).shape, state.boxes(shards, first)) for first in firsts}
        self.peers = Peers.of(ranks, tensors, {})

    def nbytes(self, first: str) -> int:
        """Return the bytes of a tensor."""
        entry: Any = self.peers.entries[first]
        return prod(entry.shape) * entry.dtype.itemsize

    def gather(self, firsts: Iterable[str], here: bool = True) -> NamedTensors:
        """Return tensors whole, in memory of their own; none where they are not wanted `here`. A collective call."""
        wholes: NamedTensors = {}
        for first in firsts if here else ():
            entry: Any = self.peers.entries[first]
            wholes[first] = torch.empty(entry.shape, dtype=entry.dtype, device=self.shards.place)
        self.peers.fill({first: [Box((0,) * x.ndim, x)] for first, x in wholes.items()})
        return wholes


def stored_names(shards: ShardState) -> dict[str, str]:
    """Stored name -> first name, each tensor once: tied ones under the name that is not declared to follow another."""
    follows = getattr(shards.bare, "_tied_weights_keys", None) or ()
    names: dict[str, list[str]] = {}
    for name, first in state.named_tensors(shards, everywhere=True):
        names.setdefault(first, []).append(name)
    out = {}
    for first, own in names.items():
        name = next((n for n in own if n not in follows), own[0])
        out[name] = first
    return out


def named_tensors(module: Any, names: str = "huggingface", bucket: int = BUCKET) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights whole, with their names, for an engine that loads such: a collective call each step.

    They are brought together a bucket at a time, on every rank, and let go of before the next. What ranks do between
    two steps is theirs, but all of them go on to the end.

    Args:
        names: "huggingface": names and forms of the original's files, tied tensors once, as `save_checkpoint` writes
            them and the `load_weights` of vLLM takes them; "original": those of the model's own state dict.
        bucket: bytes of whole tensors that a rank holds at once.

    Raises:
        InputError: the names are none of these, or a tensor is larger than the bucket.
        StateError: the weights are on the meta device.
        RankError: that is so on another rank.
    """
    shards: ShardState = module._shards
    ranks = shards.planners
    with module._calls.turn("named_tensors()"):
        together(ranks, "looking at the module", lambda: _check(shards, names))
        agree(ranks, "the options of named_tensors()", {"names": names, "bucket": str(bucket)})
        shards.agree_on_writes("named_tensors()")
        shards.show_own()
        wholes = Wholes(shards, ranks)
        groups = together(ranks, "choosing the tensors", lambda: [*_groups(wholes, names, bucket)])
    for group in groups:
        with module._calls.turn("named_tensors()"), torch.no_grad():
            tensors = wholes.gather(dict.fromkeys(group.values()))
            stored = {name: tensors[first] for name, first in group.items()}
            del tensors
            stored = reverted(shards.bare, stored) if names == "huggingface" else stored
        while stored:
            name = next(iter(stored))
            yield name, stored.pop(name)


def _check(shards: ShardState, names: str) -> None:
    if names not in NAMES:
        raise InputError(f"names={names!r}: give one of {', '.join(NAMES)}.")
    state.refuse_meta(shards)


def _groups(wholes: Wholes, names: str, bucket: int) -> Iterator[dict[str, str]]:
    """Name -> first name of the tensors that are held together."""
    every = stored_names(wholes.shards)
    if names == "original":
        every = dict(state.named_tensors(wholes.shards, everywhere=True))
    for name, first in every.items():
        if wholes.nbytes(first) > bucket:
            raise InputError(f"bucket={bucket}: {name} alone is {wholes.nbytes(first)} bytes. Give at least as many.")
    return grouped(wholes, every, bucket)


def grouped(wholes: Wholes, names: Mapping[str, str], limit: int) -> Iterator[dict[str, str]]:
    """Divide tensors into groups of at most so many bytes, in order; one that is larger is alone.

    Args:
        wholes: knows their sizes. names: of each its first name. limit: bytes of a group.
    """
    group, size = dict[str, str](), 0
    for name, first in names.items():
        nbytes = wholes.nbytes(first)
        if group and size + nbytes > limit:
            yield group
            group, size = {}, 0
        group[name], size = first, size + nbytes
    yield group
