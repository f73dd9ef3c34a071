"""Weights that several stages hold: equal on all of them to the bit, by a few values that go with every call's message.

A tied weight parts where one stage is updated otherwise than another; that shows in values alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from autotp import compat
from autotp.comm.channel import by_value
from autotp.comm.lockstep import CAUSES
from autotp.errors import RankError
from autotp.runtime import state
from autotp.runtime.call_message import (
    NOTHING,
    SAMPLED,
    SAMPLES,
    UNCHECKED,
    differ,
    few,
    refuse_samples,
    sampled,
)
from autotp.runtime.storage import ShardState

TARGET, NUMBER = struct.Struct(f"!?I{SAMPLES}d"), struct.Struct("!I")
MAX_TIED = 64  # tied weights of which values are compared: a message has a largest length
UPDATED_APART = (
    "Usual causes: another learning rate on one stage; weights that are initialised or written on one stage. Load a "
    "checkpoint, or make the stages again. What is not to be trained has requires_grad_(False)."
)


@dataclass(frozen=True)
class Tied:
    """The weights that several ranks of a pipeline hold.

    Attributes:
        shards: of this rank. holders: first name of each -> places in the pipeline that hold it.
        size: number of ranks of one place.
    """

    shards: ShardState
    holders: Mapping[str, tuple[int, ...]]
    size: int

    def values(self, target: Any, values: bool) -> bytes:
        """A few values of each, as bytes, and of the target that a step is given; nothing but its absence where
        `values` are not compared."""
        is_there = values and isinstance(target, Tensor)
        exact, near = sampled([target]) if is_there else NOTHING
        numbers = []
        for name in islice(self.holders, MAX_TIED) if values else ():
            pieces = state.pieces(self.shards, name) if name in self.shards.storages else []
            numbers.append(zlib.crc32("".join(few(compat.part_of(p)) for p in pieces).encode()))
        return TARGET.pack(is_there, exact, *near) + b"".join(map(NUMBER.pack, numbers))

    def compare(self, everyone: Sequence[bytes], what: str, slices: Sequence[Sequence[int]]) -> None:
        """Refuse tied weights, and targets, that differ.

        Args:
            everyone: what `values` gave on each rank, in the order of the mesh. what: begins, in words.
            slices: ranks that are given the same values.

        Raises:
            RankError: with what differs.
        """
        numbers = [[*NUMBER.iter_unpack(one[TARGET.size :])] for one in everyone]
        # A tied weight is split alike on every stage that holds it: ranks of one seat have the same part of it.
        for i, (name, places) in enumerate(islice(self.holders.items(), min(map(len, numbers)))):
            ranks = [r for r in range(len(everyone)) if r // self.size in places]
            own = [numbers[r][i][0] for r in ranks]
            if differ(own, [range(seat, len(own), self.size) for seat in range(self.size)]):
                texts = ["-"] * len(everyone)
                for r, number in zip(ranks, own, strict=True):
                    texts[r] = f"{number:08x}"
                head = f"At {what}, the stages that share {name} have other values of it (a few were compared)"
                raise RankError(f"{head}: {by_value(texts)}.\n{UPDATED_APART}")
        targets = [TARGET.unpack_from(one) for one in everyone]
        for own in slices:
            ranks = [r for r in own if targets[r][0]]
            head = f"The ranks do not agree on the values of the target of {what} {SAMPLED}"
            refuse_samples([(targets[r][1], targets[r][2:]) for r in ranks], head, f"{CAUSES} {UNCHECKED}")
