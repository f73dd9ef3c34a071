"""Carry blocks between ranks as a schedule says: a round at a time, one message for each pair of ranks in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.comm.lockstep import lost, meet
from autotp.comm.ranks import Ranks, from_all
from autotp.errors import StateError
from autotp.plans.pieces import Block
from autotp.plans.transfers import Send, Spread, transfer
from autotp.runtime.storage import Box

from .archives import Archive
from .dcpfiles import Tensors
from .digests import Entry

Boxes = Mapping[str, Sequence[Box]]
Holdings = dict[str, tuple[tuple[int, ...], Any, list[Block]]]  # name -> the whole's shape, type, this rank's blocks


class Peers(Archive):
    """Tensors that ranks hold, as an archive of which names, shapes and types are known; `receive` brings the values.

    Args:
        holdings: of every rank. extra: notes beside them, as of a checkpoint.
    """

    shared = True  # an optimizer's states and caches come beside the model

    def __init__(self, holdings: Sequence[Holdings], extra: dict[str, Any]) -> None:
        super().__init__("the source")
        self.holdings, self.extra = holdings, extra
        for own in holdings:
            for name, (shape, dtype, _) in own.items():
                self.entries.setdefault(name, Entry(shape, dtype, Path(self.path)))

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Refuse: what other ranks hold comes for all ranks together."""
        raise StateError(f"{name} is held by other ranks, and cannot be read by this one alone.")


def holdings_of(tensors: Tensors) -> Holdings:
    """Return what this rank holds of tensors in numbers, without those of which it holds nothing."""
    out: Holdings = {}
    for name, (shape, boxes) in tensors.items():
        if boxes:
            out[name] = shape, boxes[0].tensor.dtype, blocks_of(boxes)
    return out


def blocks_of(boxes: Iterable[Box]) -> list[Block]:
    """Return the boxes in numbers."""
    return [Block(box.offset, tuple(box.tensor.shape)) for box in boxes]


def receive(peers: Peers, have: Boxes, need: Boxes, ranks: Ranks | None, bucket: int) -> None:
    """Fill this rank's boxes from what all ranks hold. A collective call.

    Args:
        peers: what ranks hold, in numbers. have: this rank's of these. need: to fill, by the same names.
        ranks: that move; None for one process alone. bucket: bytes of messages that a rank holds at once.

    Raises:
        RankError: a rank has ended, or left.
    """
    everyone = from_all(ranks, {name: blocks_of(boxes) for name, boxes in need.items()}, "the blocks of a move")
    spreads = {}
    for name, entry in peers.entries.items():
        needs = {rank: own[name] for rank, own in enumerate(everyone) if name in own}
        if needs:
            haves = {rank: own[name][2] for rank, own in enumerate(peers.holdings) if name in own}
            assert isinstance(entry.dtype, torch.dtype)
            spreads[name] = Spread(entry.shape, entry.dtype.itemsize, haves, needs)
    way, rank = transfer(spreads, bucket), ranks.rank if ranks is not None else 0
    for send in way.local:
        if send.target == rank:
            _within(need, send).copy_(_within(have, send))
    for i, sends in enumerate(way.rounds, 1):
        assert ranks is not None
        # Who has ended or left is heard of here: in a round each rank waits for those alone that it exchanges with.
        meet(ranks.channel, f"round {i} of {len(way.rounds)} of a move")
        _round([x for x in sends if rank in (x.source, x.target)], have, need, ranks)


def _within(boxes: Boxes, send: Send) -> Tensor:
    """The memory of a block, in the box that holds it."""
    for box in boxes[send.name]:
        pairs = zip(*send.block, box.offset, box.tensor.shape, strict=True)
        if all(at <= start and start + n <= at + length for start, n, at, length in pairs):
            starts = [start - at for start, at in zip(send.block.offset, box.offset, strict=True)]
            return box.tensor[tuple(slice(a, a + n) for a, n in zip(starts, send.block.size, strict=True))]
    raise AssertionError(f"no box of {send.name} has {send.block}")


def _round(sends: Sequence[Send], have: Boxes, need: Boxes, ranks: Ranks) -> None:
    """Exchange one message with each rank that this one has something for, or something from."""
    pairs: dict[tuple[int, int], list[tuple[Send, Tensor]]] = {}
    for x in sends:
        own = _within(have if x.source == ranks.rank else need, x)
        pairs.setdefault((x.source, x.target), []).append((x, own))
    operations, arrivals = [], []
    for (source, target), parts in sorted(pairs.items(), key=lambda pair: pair[0]):
        message, views = _message(parts, ranks.device)
        if source == ranks.rank:
            for view, (_, part) in zip(views, parts, strict=True):
                view.copy_(part)
            operations.append(dist.P2POp(dist.isend, message, group=ranks.group, group_peer=target))
        else:
            operations.append(dist.P2POp(dist.irecv, message, group=ranks.group, group_peer=source))
            arrivals += [(part, view) for view, (_, part) in zip(views, parts, strict=True)]
    _wait(operations, ranks)
    for part, view in arrivals:
        part.copy_(view)


def _message(parts: Sequence[tuple[Send, Tensor]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for a message, and the view of it that each part is, in the order of the parts."""
    message = torch.empty(sum(x.nbytes for x, _ in parts), dtype=torch.uint8, device=device)
    views: dict[int, Tensor] = {}
    at = 0
    # Those of the largest elements first: so each begins at a multiple of its own, with nothing between.
    for i in sorted(range(len(parts)), key=lambda i: -parts[i][1].itemsize):
        send, part = parts[i]
        views[i] = message[at : at + send.nbytes].view(part.dtype).view(part.shape)
        at += send.nbytes
    return message, [views[i] for i in range(len(parts))]


def _wait(operations: list[Any], ranks: Ranks) -> None:
    """Wait for all of a round, also where one fails: who is there gets what it waits for.

    Raises:
        RankError: it names the rank that is gone.
    """
    errors = []
    for work in dist.batch_isend_irecv(operations) if operations else ():
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)
    for error in errors:
        lost(error, ranks.group_name)
        raise error
