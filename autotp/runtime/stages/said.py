"""What a rank says of a step before it begins, and in what the ranks of a pipeline may not differ.

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
from autotp.runtime.samples import SAMPLES, Sample, alike, few, leading
from autotp.runtime.shard_state import ShardState

HEAD, TIED = struct.Struct(f"!IIIB?III{SAMPLES}dI{SAMPLES}d"), struct.Struct("!I")
MOST = 64  # tied weights of which values are compared: a message has a largest length
UPDATES = ("no optimizer has taken a step", "an optimizer has taken a step", "nothing is trained")
UNTRAINED = 2
UPDATED_APART = (
    "Usual causes: a step of an optimizer that is left out, or has other options, on one stage; a gradient scaler, "
    "which sees the gradients of one rank's stages (take bfloat16); weights that are initialised or written on one "
    "stage. Load a checkpoint, or make the stages again. What is not to be trained has requires_grad_(False)."
)


class StepMessage(NamedTuple):
    """Of one rank's step.

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
        """As a message."""
        batch, target = ((exact, *near) for exact, near in (self.batch, self.target))
        return HEAD.pack(*self[:7], *batch, *target) + b"".join(map(TIED.pack, self.tied))

    @classmethod
    def read(cls, message: bytes) -> StepMessage:
        """Of a message."""
        fields, tied = HEAD.unpack_from(message), [x for (x,) in TIED.iter_unpack(message[HEAD.size :])]
        end = 8 + SAMPLES
        return cls._make((*fields[:7], (fields[7], fields[8:end]), (fields[end], fields[end + 1 :]), tied))


def values_of(shards: ShardState, names: Iterable[str]) -> list[int]:
    """A few values of each of the first of these parameters, as a number; 0 of those that this rank does not hold."""
    numbers = []
    for name in islice(names, MOST):
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
    if len({m.updates for m in everyone} - {UNTRAINED}) > 1:
        differences = by_value([UPDATES[m.updates] for m in everyone])
        raise RankError(f"Before the {what}, the stages have parted: {differences}.\n{UPDATED_APART}")
    places = {m.place for m in everyone}
    trained = [m.trained for m in everyone]
    writes = [m.writes for m in everyone]
    for of, numbers in (("which weights are trained", trained), ("how often weights were written", writes)):
        states = {(m.place, number) for m, number in zip(everyone, numbers, strict=True)}
        if len(states) > len(places):
            differences = by_value([str(number) for number in numbers])
            raise RankError(f"Before the {what}, ranks of one stage have parted in {of}: {differences}.\n{CAUSES}")
    count = min(len(m.tied) for m in everyone)  # none where a rank compares no values
    for i, (name, holders) in enumerate(islice(tied.items(), count)):
        values = {(m.seat, m.tied[i]) for m in everyone if m.place in holders}
        if len(values) > len(dict(values)):  # two values on ranks that hold the same part
            texts = [f"{m.tied[i]:08x}" for m in everyone]
            raise RankError(
                f"At the {what}, the stages that share {name} have other values of it (a few were compared, 0 where it "
                f"is not): {by_value(texts)}.\n{UPDATED_APART}"
            )
    for lane in {m.lane for m in everyone}:
        beside = [m for m in everyone if m.lane == lane]
        _alike("inputs", [m.batch for m in beside], what)
        _alike("target", [m.target for m in beside if m.place == last], what)


def _alike(of: str, samples: Sequence[Sample], what: str) -> None:
    if not alike(samples):
        texts = [f"{exact:08x} {leading(near)}" for exact, near in samples]
        raise RankError(
            f"The ranks do not agree on the values of the {of} of the {what} (a sum of whole numbers, and some "
            f"others): {by_value(texts)}. The ranks of all stages have the same ones, with dp those of one dp rank, "
            f"which are counted here.\n{CAUSES} With check=False values of inputs are not looked at."
        )
