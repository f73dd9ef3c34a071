"""Who sends which block to whom, so that tensors that lie over ranks in one way lie in another: numbers, no process.

Each byte that a rank lacks arrives once, from a rank that has it; what it has already is copied there. Where several
ranks have a byte they share the sending, so that the busiest of all sends as little as can be (`_quotas`). Sends are
packed into rounds, in each of which no rank packs and unpacks more than a bucket.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
SWEEPS = 200  # over the sets of holders, until their shares are even
SLACK = 0.05  # of the busiest rank's bytes, by which all its shares together may be passed rather than cut a block


class Spread(NamedTuple):
    """A tensor, and who has which blocks of it and who needs which.

    Attributes:
        shape: of the whole. itemsize: bytes of an element.
        have, need: rank -> blocks, which on one rank do not overlap.
    """

    shape: tuple[int, ...]
    itemsize: int
    have: Mapping[int, Sequence[Block]]
    need: Mapping[int, Sequence[Block]]


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
    """The way from one layout to another: print it for what ranks send, receive and have already.

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
        return self._sums((x.source, x) for x in self.sends)

    @cached_property
    def incoming(self) -> dict[int, int]:
        """Rank -> bytes that it receives."""
        return self._sums((x.target, x) for x in self.sends)

    @cached_property
    def present(self) -> dict[int, int]:
        """Rank -> bytes that it needs and has."""
        return self._sums((x.target, x) for x in self.local)

    def _sums(self, pairs: Iterable[tuple[int, Send]]) -> dict[int, int]:
        sums = dict.fromkeys(self.ranks, 0)
        for rank, x in pairs:
            sums[rank] += x.nbytes
        return sums

    def to_json(self) -> str:
        """All of it as JSON text.

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
    """The way with the fewest bytes from what ranks have to what ranks need.

    Args:
        tensors: by name, in the order in which they are sent. bucket: bytes that a rank packs and unpacks at once.

    Raises:
        InputError: nobody has what a rank needs, or the bucket is smaller than an element.
    """
    if bucket < LEAST_BUCKET:
        raise InputError(f"bucket={bucket}: it holds the largest element, so it is at least {LEAST_BUCKET} bytes.")
    table: dict[object, list[_Part]] = {}  # equal tensors of equal blocks of a model have equal parts
    local: list[Send] = []
    lacking: dict[tuple[int, ...], list[Send]] = {}  # by those who have it; each without a source so far
    gathered = 0
    for name, x in tensors.items():
        key = x.shape, _key(x.have), _key(x.need)
        parts = table[key] if key in table else table.setdefault(key, [*_parts(name, x)])
        for part in parts:
            nbytes = part.block.elements * x.itemsize
            if part.target in part.holders:
                local.append(Send(name, part.block, part.target, part.target, nbytes))
            else:
                lacking.setdefault(part.holders, []).append(Send(name, part.block, -1, part.target, nbytes))
        for rank in x.need:
            own = sum(block.elements for block in x.have.get(rank, ()))
            gathered += (prod(x.shape) - own) * x.itemsize
    order = {name: i for i, name in enumerate(tensors)}
    sends = sorted(_sourced(lacking), key=lambda send: order[send.name])  # stable: one order on every rank
    ranks = sorted({rank for x in tensors.values() for rank in (*x.have, *x.need)})
    return Transfer(_rounds(sends, bucket), tuple(local), gathered, bucket, ranks=tuple(ranks))


def between(before: Plan, after: Plan, first: int = 0, bucket: int = BUCKET) -> Transfer:
    """The way of the parameters from one plan to another.

    Args:
        before, after, first, bucket: see `Plan.transfer`, where these are the plan, `other`, and the rest.
    """
    plans = before, after
    here, there = map(_kinds, plans)
    if here != there:
        name, _ = min(here.items() ^ there.items())
        raise InputError(
            f"{name} is {here.get(name, 'absent')} in the plan of {before.model} and {there.get(name, 'absent')} in "
            f"that of {after.model}: weights move between plans of one model."
        )
    layouts = before.placements, after.placements
    tensors = {}
    for p in before.parameters:
        have, need = (
            _blocks(plan, Pieces(p.shape, own[p.name], plan.tp), start)
            for plan, own, start in zip(plans, layouts, (0, first), strict=True)
        )
        tensors[p.name] = Spread(p.shape, getattr(torch, p.dtype).itemsize, have, need)
    texts = [_words(plan, start) for plan, start in zip(plans, (0, first), strict=True)]
    return replace(transfer(tensors, bucket), model=before.model, before=texts[0], after=texts[1])


def _kinds(plan: Plan) -> dict[str, str]:
    return {p.name: f"{p.dtype} {list(p.shape)}" for p in plan.parameters}


def _blocks(plan: Plan, pieces: Pieces, first: int) -> dict[int, list[Block]]:
    """Rank -> what it holds of a parameter under a plan for ranks from `first` on, counted as a mesh counts them."""
    beside = plan.batch.size
    return {
        first + place * plan.tp + rank: pieces.blocks(rank, (place, beside) if plan.batch.fully_shard else (0, 1))
        for place in range(beside)
        for rank in range(plan.tp)
    }


def _words(plan: Plan, first: int) -> str:
    beside = f"{plan.batch.text} x " if plan.batch.size > 1 else ""
    spread = ", fully sharded" if plan.batch.fully_shard else ""
    last = first + plan.tp * plan.batch.size - 1
    return f"{beside}tp={plan.tp}{spread} on rank{f's {first}-{last}' if last > first else f' {first}'}"


def _key(blocks: Mapping[int, Sequence[Block]]) -> object:
    return tuple((rank, *own) for rank, own in blocks.items())


def _parts(name: str, x: Spread) -> Iterator[_Part]:
    """Cut what each rank needs where it lies with other holders."""
    holdings = list(dict.fromkeys(block for own in x.have.values() for block in own))
    for rank, blocks in x.need.items():
        for block in blocks:
            if not block.elements:
                continue
            near = [other for other in holdings if _overlap(block, other)]
            parts = [block]
            for other in near:
                parts = [*chain.from_iterable(_split(part, other) for part in parts)]
            for part in parts:
                holders = [r for r, own in x.have.items() if _holds(own, part)]
                if not holders:
                    raise InputError(
                        f"no rank has {name} at {part.offset}, of size {part.size}, which rank {rank} needs."
                    )
                yield _Part(part, rank, tuple(sorted(holders)))


def _overlap(one: Block, other: Block) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)


def _holds(own: Iterable[Block], block: Block) -> bool:
    for other in own:
        pairs = zip(*block, *other, strict=True)
        if all(b <= a and a + n <= b + m for a, n, b, m in pairs):
            return True
    return False


def _split(block: Block, other: Block) -> Iterator[Block]:
    """Cut a block into what lies in another one and what does not."""
    if not _overlap(block, other):
        yield block
        return
    for d in range(len(block.size)):
        first, end = block.offset[d], block.offset[d] + block.size[d]
        low, high = max(first, other.offset[d]), min(end, other.offset[d] + other.size[d])
        if first < low:
            yield block.span(d, first, low - first)
        if high < end:
            yield block.span(d, high, end - high)
        block = block.span(d, low, high - low)
    yield block


# ---- who sends ------------------------------------------------------------------------------------------------------


def _quotas(demands: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], dict[int, float]]:
    """Share what each set of holders has to send among its members, so that the busiest sends least.

    Each set in turn fills its members up to one level beside what they send for other sets. That ends at the smallest
    sum of squares, of which the largest is the least possible too.

    Args:
        demands: ranks that have the same blocks -> bytes of these that others lack.
    """
    shares = {holders: dict.fromkeys(holders, n / len(holders)) for holders, n in demands.items()}
    loads = dict.fromkeys((r for holders in demands for r in holders), 0.0)
    for own in shares.values():
        for r, share in own.items():
            loads[r] += share
    for _ in range(SWEEPS):
        change = 0.0
        for holders, n in demands.items():
            own = shares[holders]
            # What they send for other sets stays as it is in this turn: filled up from the one with the least of that.
            beside = sorted((loads[r] - own[r], r) for r in holders)
            level, total = 0.0, float(n)
            for i, (load, _) in enumerate(beside, 1):
                total += load
                level = total / i
                if i == len(beside) or level <= beside[i][0]:
                    break
            # Those whose own load is above the level send nothing for this set.
            for load, r in beside:
                share = max(level - load, 0.0)
                change += abs(share - own[r])
                own[r], loads[r] = share, load + share
        # A chain of sets, each with one member of the next, takes several sweeps; most take two.
        if change <= 1e-4 * sum(demands.values()):
            break
    return shares


def _sourced(lacking: Mapping[tuple[int, ...], Sequence[Send]]) -> Iterator[Send]:
    """Give every block a source, cut in two where one source's share ends within it."""
    demands = Counter[tuple[int, ...]]()
    for holders, sends in lacking.items():
        demands[holders] = sum(x.nbytes for x in sends)
    shares = _quotas(demands)
    loads: dict[int, float] = {}
    for own in shares.values():
        for r, share in own.items():
            loads[r] = loads.get(r, 0.0) + share
    slack = SLACK * max(loads.values(), default=0.0) / max(len(demands), 1)
    for holders, sends in lacking.items():
        remains = shares[holders]
        for send in sends:
            rest: Send | None = send
            while rest is not None:
                # The one with most to send: so all of them send from the first round on, and few blocks are cut.
                source = max(remains, key=remains.__getitem__)
                now, rest = _first(rest, remains[source], slack) if len(holders) > 1 else (rest, None)
                remains[source] -= now.nbytes
                yield now._replace(source=source)


def _first(send: Send, nbytes: float, slack: float) -> tuple[Send, Send | None]:
    """Cut off so many bytes of a block, where it has clearly more."""
    size = send.block.size
    if send.nbytes <= nbytes + slack or not size:
        return send, None
    # Rows of the first dimension lie together; where they are too coarse, along the longest.
    d = 0 if send.nbytes / size[0] <= max(slack, 1) else size.index(max(size))
    rows = round(nbytes / (send.nbytes / size[d]))
    if not 0 < rows < size[d]:
        return send, None
    return _cut(send, d, 0, rows), _cut(send, d, rows, size[d] - rows)


def _cut(send: Send, dim: int, start: int, length: int) -> Send:
    block = send.block.span(dim, send.block.offset[dim] + start, length)
    return send._replace(block=block, nbytes=send.nbytes // send.block.size[dim] * length)


# ---- rounds ---------------------------------------------------------------------------------------------------------


def _rounds(sends: Iterable[Send], bucket: int) -> tuple[tuple[Send, ...], ...]:
    """Put each send into the first round that its two ranks have room in, and in which neither is done."""
    rounds: list[list[Send]] = []
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


def _limited(send: Send, bucket: int) -> Iterator[Send]:
    """Cut a send into some that each fit into a bucket."""
    if send.nbytes <= bucket:
        yield send
        return
    d = next(i for i, n in enumerate(send.block.size) if n > 1)
    rows = max(1, bucket * send.block.size[d] // send.nbytes)
    for start in range(0, send.block.size[d], rows):
        yield from _limited(_cut(send, d, start, min(rows, send.block.size[d] - start)), bucket)
