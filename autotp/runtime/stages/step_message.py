"""Message that the ranks of a pipeline exchange before a step, and in what they may not differ.

All ranks of one dp rank are given the same batch. What several stages hold, a tied weight, is equal on all of them to
the bit: it parts where one stage is updated otherwise than another.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from autotp import compat
from autotp.comm.channel import by_value
from autotp.comm.lockstep import CAUSES
from autotp.errors import RankError
from autotp.runtime import state
from autotp.runtime.call_message import SAMPLES, Sample, alike, few, leading
from autotp.runtime.storage import ShardState

HEAD, TIED = struct.Struct(f"!IIIB?III{SAMPLES}dI{SAMPLES}d"), struct.Struct("!I")
MAX_TIED = 64  # tied weights of which values are compared: a message has a largest length
UPDATES = {0: "no optimizer has taken a step", 1: "an optimizer has taken a step"}
UNTRAINED = 2  # nothing is
UPDATED_APART = (
    "Usual causes: a step of an optimizer that is left out, or has other options, on one stage; a gradient scaler, "
    "which sees the gradients of one rank's stages (take bfloat16); weights that are initialised or written on one "
    "stage. Load a checkpoint, or make the stages again. What is not to be trained has requires_grad_(False)."
)


class StepMessage(NamedTuple):
    """Message of one rank before a step.

    Attributes:
        lane, seat, place: the rank's on the axes dp, tp and pp.
        updates: of its weights since the step before, as `UPDATES` has it.
        hooked: whether hooks of the user may fail amid its collectives.
        writes: how often its weights were written since the step before. trained: which are, as a number.
        batch, target: a few values of the inputs, and of the target on ranks with the last stage.
        tied: likewise, in short, of each weight that several ranks of the pipeline hold; 0 where this one does not.
    """

    lane: int
    seat: int
    place: int
    updates: int
    hooked: bool
    writes: int
    trained: int
    batch: Sample
    target: Sample
    tied: Sequence[int]

    def packed(self) -> bytes:
        """Write it as bytes."""
        batch, target = ((exact, *near) for exact, near in (self.batch, self.target))
        return HEAD.pack(*self[:7], *batch, *target) + b"".join(map(TIED.pack, self.tied))

    @classmethod
    def read(cls, message: bytes) -> StepMessage:
        """Read it from bytes."""
        fields, tied = HEAD.unpack_from(message), [x for (x,) in TIED.iter_unpack(message[HEAD.size :])]
        end = 8 + SAMPLES
        return cls._make((*fields[:7], (fields[7], fields[8:end]), (fields[end], fields[end + 1 :]), tied))


def values_of(shards: ShardState, names: Iterable[str]) -> list[int]:
    """A few values of each of the first of these parameters, as a number; 0 of those that this rank does not hold."""
    numbers = []
    for name in islice(names, MAX_TIED):
        pieces = state.pieces(shards, name) if name in shards.storages else []
        numbers.append(zlib.crc32("".join(few(compat.part_of(p)) for p in pieces).encode()))
    return numbers


def compare(everyone: Sequence[StepMessage], tied: Mapping[str, tuple[int, ...]], last: int, what: str) -> None:
    """Refuse weights that were updated or written on some ranks only, or otherwise, and other values of the inputs.

    Args:
        everyone: the messages, by rank. tied: places in the pipeline that hold each tied weight.
        last: the place that has the last stage. what: the step in words.

    Raises:
        RankError: with what differs.
    """
    # Weights of all stages are updated together: one stage that took no step has parted from all others.
    updates = [UPDATES.get(m.updates) for m in everyone]
    _same(f"Before the {what}, the stages have parted", [0] * len(everyone), updates, UPDATED_APART)
    # Each stage has parameters of its own, so what is trained and written is compared on the ranks of one place.
    places = [m.place for m in everyone]
    apart = f"Before the {what}, ranks of one stage have parted in"
    _same(f"{apart} which weights are trained", places, [str(m.trained) for m in everyone], CAUSES)
    _same(f"{apart} how often weights were written", places, [str(m.writes) for m in everyone], CAUSES)
    # A tied weight is split over tp alike on every stage that holds it: ranks of one seat have the same part of it.
    seats = [m.seat for m in everyone]
    count = min(len(m.tied) for m in everyone)  # none where one compares no values
    for i, (name, holders) in enumerate(islice(tied.items(), count)):
        head = f"At the {what}, the stages that share {name} have other values of it (a few were compared)"
        texts: list[str | None] = []
        for m in everyone:
            texts.append(f"{m.tied[i]:08x}" if m.place in holders else None)
        _same(head, seats, texts, UPDATED_APART)
    # With dp each lane has a batch of its own; the target comes to the last stage alone.
    for lane in {m.lane for m in everyone}:
        beside = [m for m in everyone if m.lane == lane]
        _alike("inputs", [m.batch for m in beside], what)
        _alike("target", [m.target for m in beside if m.place == last], what)


def _same(head: str, groups: Sequence[int], texts: Sequence[str | None], advice: str) -> None:
    """Refuse what differs between ranks of one group; None is equal to all."""
    pairs = {(group, text) for group, text in zip(groups, texts, strict=True) if text is not None}
    if len(pairs) > len(dict(pairs)):
        raise RankError(f"{head}: {by_value([text or '-' for text in texts])}.\n{advice}")


def _alike(of: str, samples: Sequence[Sample], what: str) -> None:
    if not alike(samples):
        texts = [f"{exact:08x} {leading(near)}" for exact, near in samples]
        raise RankError(
            f"The ranks do not agree on the values of the {of} of the {what} (a sum of whole numbers, and some "
            f"others): {by_value(texts)}. The ranks of all stages have the same ones, with dp those of one dp rank, "
            f"which are counted here.\n{CAUSES} With check=False values of inputs are not looked at."
        )
