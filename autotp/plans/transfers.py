"""Transfers of tensors from one sharding to another: which rank sends which block to which, in numbers, no process.

Each byte that a rank lacks arrives once, from a rank that has it; what it has already is copied there. Where several
ranks have a byte they share the sending, so that the busiest of all sends as little as can be (`_quotas`). Sends are
packed into rounds, in each of which no rank packs and unpacks more than a bucket.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from autotp.errors import InputError

from .pieces import BUCKET, Block, Pieces

if TYPE_CHECKING:
    from .plan import Plan

LEAST_BUCKET = 16  # bytes of the largest element
PARTS = 16  # of what each rank would send by an even share: a block that several have is cut into none that are larger


class Spread(NamedTuple):
    """A tensor, and who has which blocks of it and who needs which.

    Attributes:
        shape: of the whole. itemsize: bytes of an element.
        have, need: rank -> blocks, which on one rank do not overlap.
    """

    shape: tuple[int, ...]
    itemsize: int
    have: Mapping[int, Collection[Block]]
    need: Mapping[int, Collection[Block]]


class Send(NamedTuple):
    """A block of a tensor that a rank gives to a rank, which may be itself."""

    name: str
    block: Block
    source: int
    target: int
    nbytes: int


class _Part(NamedTuple):
    """A block that a rank needs, and all ranks that have it."""

    block: Block
    target: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The sends that take tensors from one sharding to another. Print it for what ranks send, receive and have already.

    Attributes:
        rounds: of sends between ranks, one after the other. local: copies within a rank.
        gathered: bytes that ranks would receive if each gathered every tensor whole that it needs a part of.
        bucket: bytes that a rank packs and unpacks in a round, at most.
        model, before, after: in words, for what is printed.
    """

    rounds: tuple[tuple[Send, ...], ...]
    local: tuple[Send, ...]
    gathered: int
    bucket: int
    model: str = ""
    before: str = ""
    after: str = ""
    ranks: tuple[int, ...] = field(default=(), repr=False)

    @property
    def sends(self) -> Iterator[Send]:
        """All sends between ranks, in order."""
        for sends in self.rounds:
            yield from sends

    @cached_property
    def bytes(self) -> int:
        """Bytes that are sent in all."""
        return sum(x.nbytes for x in self.sends)

    @cached_property
    def outgoing(self) -> dict[int, int]:
        """Rank -> bytes that it sends."""
        return self._sums("source", self.sends)

    @cached_property
    def incoming(self) -> dict[int, int]:
        """Rank -> bytes that it receives."""
        return self._sums("target", self.sends)

    @cached_property
    def present(self) -> dict[int, int]:
        """Rank -> bytes that it needs and has."""
        return self._sums("target", self.local)

    def _sums(self, end: str, sends: Iterable[Send]) -> dict[int, int]:
        sums = dict.fromkeys(self.ranks, 0)
        for x in sends:
            sums[getattr(x, end)] += x.nbytes
        return sums

    def to_json(self) -> str:
        """Write all of it as JSON text.

        `ranks` has a row for each rank: its number, bytes that it sends, receives and has already; `rounds` in each
        round a row for each send: the tensor's name, offset and size of the block, source, target, bytes.
        """
        rows = [(rank, self.outgoing[rank], self.incoming[rank], self.present[rank]) for rank in self.ranks]
        rounds = []
        for sends in self.rounds:
            rounds.append([[x.name, *x.block, x.source, x.target, x.nbytes] for x in sends])
        head = {"model": self.model, "before": self.before, "after": self.after, "bucket": self.bucket}
        return json.dumps({**head, "bytes": self.bytes, "gather_all": self.gathered, "ranks": rows, "rounds": rounds})

    def to_svg(self, path: str | Path) -> None:
        """Draw how much each rank sends to each."""
        from autotp.plans.show.transfer import draw_transfer  # noqa: PLC0415  jinja2 is read only where it is wanted

        draw_transfer(self, path)

    def __str__(self) -> str:
        from autotp.plans.show.transfer import view  # noqa: PLC0415  as rich

        return str(view(self))


def transfer(tensors: Mapping[str, Spread], bucket: int = BUCKET) -> Transfer:
    """Plan the transfer with the fewest bytes from the blocks that ranks have to the blocks that they need.

    Args:
        tensors: by name, in the order in which they are sent. bucket: bytes that a rank packs and unpacks at once.

    Raises:
        InputError: nobody has what a rank needs, or the bucket is smaller than an element.
    """
    if bucket < LEAST_BUCKET:
        raise InputError(f"bucket={bucket}: it holds the largest element, so it is at least {LEAST_BUCKET} bytes.")
    table = {}  # equal tensors of equal blocks of a model have equal parts
    local = []
    lacking = []
    gathered = 0
    for name, x in tensors.items():
        key = x.shape, _key(x.have), _key(x.need)
        parts = table[key] if key in table else table.setdefault(key, [*_parts(name, x)])
        for part in parts:
            nbytes = part.block.elements * x.itemsize
            if part.target in part.holders:
                local.append(Send(name, part.block, part.target, part.target, nbytes))
            else:
                lacking.append((Send(name, part.block, -1, part.target, nbytes), part.holders))
        for rank in x.need:
            present = sum(block.elements for block in x.have.get(rank, ()))
            gathered += (prod(x.shape) - present) * x.itemsize
    ranks = sorted({rank for x in tensors.values() for rank in (*x.have, *x.need)})
    return Transfer(_rounds(_sourced(lacking), bucket), tuple(local), gathered, bucket, ranks=tuple(ranks))


def between(before: Plan, after: Plan, first: int = 0, bucket: int = BUCKET) -> Transfer:
    """Plan the transfer of the parameters from one plan's placements to another's.

    Args:
        before, after, first, bucket: see `Plan.transfer`, where these are the plan, `other`, and the rest.
    """
    plans = before, after
    one, other = map(_kinds, plans)
    if one != other:
        name, _ = min(one.items() ^ other.items())
        raise InputError(
            f"{name} is {one.get(name, 'absent')} in the plan of {before.model} and {other.get(name, 'absent')} in "
            f"that of {after.model}: weights move between plans of one model."
        )
    placements = before.placements, after.placements
    tensors = {}
    for p in before.parameters:
        have, need = (
            _blocks(plan, Pieces(p.shape, layouts[p.name], plan.tp, owners=plan.batch.owners(p.name)), start)
            for plan, layouts, start in zip(plans, placements, (0, first), strict=True)
        )
        tensors[p.name] = Spread(p.shape, getattr(torch, p.dtype).itemsize, have, need)
    texts = [_words(plan, start) for plan, start in zip(plans, (0, first), strict=True)]
    return replace(transfer(tensors, bucket), model=before.model, before=texts[0], after=texts[1])


def _kinds(plan: Plan) -> dict[str, str]:
    return {p.name: f"{p.dtype} {list(p.shape)}" for p in plan.parameters}


def _blocks(plan: Plan, pieces: Pieces, first: int) -> dict[int, list[Block]]:
    """Map each rank to its blocks of a parameter under a plan for ranks from `first` on, in the mesh's order."""
    beside = plan.batch.size
    spread = plan.batch.fully_shard or pieces.owners > 1
    return {
        first + place * plan.tp + rank: pieces.blocks(rank, (place, beside) if spread else (0, 1))
        for place in range(beside)
        for rank in range(plan.tp)
    }


def _words(plan: Plan, first: int) -> str:
    beside = f"{plan.batch.text} x " if plan.batch.size > 1 else ""
    spread = ", fully sharded" if plan.batch.fully_shard else ""
    last = first + plan.tp * plan.batch.size - 1
    return f"{beside}tp={plan.tp}{spread} on rank{f's {first}-{last}' if last > first else f' {first}'}"


def _key(blocks: Mapping[int, Collection[Block]]) -> object:
    return tuple((rank, *owned) for rank, owned in blocks.items())


def _parts(name: str, x: Spread) -> Iterator[_Part]:
    """Cut the blocks that ranks need where the set of ranks that have them changes."""
    holdings = dict.fromkeys(chain.from_iterable(x.have.values()))
    for rank, blocks in x.need.items():
        for block in blocks:
            parts = [block] if block.elements else []
            for other in holdings:
                parts = [*chain.from_iterable(_split(part, other) for part in parts)]
            for part in parts:
                holders = [r for r, owned in x.have.items() if _holds(owned, part)]
                if not holders:
                    raise InputError(
                        f"no rank has {name} at {part.offset}, of size {part.size}, which rank {rank} needs."
                    )
                yield _Part(part, rank, tuple(sorted(holders)))


def _holds(owned: Iterable[Block], block: Block) -> bool:
    return any(block.common(other) == block for other in owned)


def _split(block: Block, other: Block) -> Iterator[Block]:
    """Cut a block into its intersection with another one and the rest."""
    common = block.common(other)
    for d in range(len(block.size)) if common.elements else ():
        first, low = block.offset[d], common.offset[d]
        end, high = first + block.size[d], low + common.size[d]
        if first < low:
            yield block.span(d, first, low - first)
        if high < end:
            yield block.span(d, high, end - high)
        block = block.span(d, low, high - low)
    yield block


# ---- who sends ------------------------------------------------------------------------------------------------------


def _sourced(lacking: Sequence[tuple[Send, Sequence[int]]]) -> list[Send]:
    """Give every block a source among those that have it, so that the busiest of all sends as little as can be.

    A block that several have goes in parts, each from the one that sends least so far. Then each part is given to
    another rank as long as that evens the two out, which ends at the smallest sum of squares but for a part.

    Args:
        lacking: blocks without a source so far, and the ranks that have each.
    """
    loads, sources = Counter[int](), set[int]().union(*(holders for _, holders in lacking))
    limit = sum(send.nbytes for send, _ in lacking) // (PARTS * max(len(sources), 1))
    parts = []
    for send, holders in lacking:
        for part in _limited(send, limit) if len(holders) > 1 else (send,):
            source = min(holders, key=loads.__getitem__)
            loads[source] += part.nbytes
            parts.append((part._replace(source=source), holders))
    while True:
        changes = 0
        for i, (part, holders) in enumerate(parts):
            source = min(holders, key=loads.__getitem__)
            if loads[source] + part.nbytes < loads[part.source]:
                loads[source] += part.nbytes
                loads[part.source] -= part.nbytes
                parts[i], changes = (part._replace(source=source), holders), changes + 1
        if not changes:
            return [part for part, _ in parts]


# ---- rounds ---------------------------------------------------------------------------------------------------------


def _rounds(sends: Iterable[Send], bucket: int) -> tuple[tuple[Send, ...], ...]:
    """Put each send into the first round that its two ranks have room in, and in which neither is done."""
    rounds = []
    latest, fill = Counter[int](), Counter[int]()  # rank -> its latest round, and the bytes in that
    for send in sends:
        for part in _limited(send, bucket):
            pair = part.source, part.target
            place = max(latest[r] for r in pair)
            place += any(latest[r] == place and fill[r] + part.nbytes > bucket for r in pair)
            for r in pair:
                fill[r] = part.nbytes + (fill[r] if latest[r] == place else 0)
                latest[r] = place
            rounds += [[] for _ in range(place + 1 - len(rounds))]
            rounds[place].append(part)
    return tuple(map(tuple, rounds))


def _limited(send: Send, limit: int) -> Iterator[Send]:
    """Cut a send into some of at most so many bytes, or of single elements."""
    offset, size = send.block
    d = next((i for i, n in enumerate(size) if n > 1), None)
    if send.nbytes <= limit or d is None:
        yield send
        return
    row = send.nbytes // size[d]
    rows = max(1, limit // row)
    for start in range(0, size[d], rows):
        length = min(rows, size[d] - start)
        part = send._replace(block=send.block.span(d, offset[d] + start, length), nbytes=row * length)
        yield from _limited(part, limit)
