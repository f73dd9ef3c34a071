"""Carry blocks between ranks as a schedule says: a round at a time, one message for each pair of ranks in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.comm.lockstep import lost, meet
from autotp.comm.ranks import Ranks, from_all, own_place
from autotp.errors import StateError
from autotp.plans.pieces import BUCKET, Block
from autotp.plans.transfers import Send, Spread, transfer
from autotp.runtime.storage import Box

from .archives import Archive, Boxes
from .dcpfiles import Tensors
from .digests import Entry

Holdings = Mapping[str, tuple[tuple[int, ...], Any, Collection[Block]]]  # name -> the whole's shape, type, blocks


class Peers(Archive):
    """Tensors that ranks hold, as an archive of which names, shapes and types are known; `fill` brings the values.

    Args:
        ranks: that move; None for one process alone. have: this rank's boxes. holdings: of every rank, in numbers.
        extra: notes beside them, as of a checkpoint. bucket: bytes of messages that a rank holds at once.
        path: their name in messages.
    """

    shared = True  # an optimizer's states and caches come beside the model

    def __init__(
        self, ranks: Ranks | None, have: Boxes, holdings: Sequence[Holdings], extra: dict[str, Any],
        bucket: int = BUCKET, path: Path | str = "the source",
    ) -> None:  # fmt: skip
        super().__init__(path)
        self.ranks, self.have, self.holdings, self.extra, self.bucket = ranks, have, holdings, extra, bucket
        for own in holdings:
            for name, (shape, dtype, _) in own.items():
                self.entries.setdefault(name, Entry(shape, dtype, Path(path)))

    @staticmethod
    def of(ranks: Ranks | None, tensors: Tensors, extra: dict[str, Any], bucket: int = BUCKET) -> Peers:
        """Tell all ranks what this one holds. A collective call.

        Args:
            ranks, extra, bucket: see the class. tensors: this rank's.
        """
        have = {name: boxes for name, (_, boxes) in tensors.items() if boxes}
        own = {}
        for name, boxes in have.items():
            own[name] = tensors[name][0], boxes[0].tensor.dtype, _blocks(boxes)
        return Peers(ranks, have, from_all(ranks, own, "which rank has which blocks"), extra, bucket)

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Refuse: what other ranks hold comes for all ranks together."""
        raise StateError(f"{name} is held by other ranks, and cannot be read by this one alone.")

    def fill(self, need: Boxes) -> None:
        """Fill this rank's boxes from what all ranks hold. A collective call.

        Raises:
            RankError: a rank has ended, or left.
        """
        ranks, spreads = self.ranks, {}
        everyone = from_all(ranks, {name: _blocks(boxes) for name, boxes in need.items()}, "the blocks of a move")
        for name, entry in self.entries.items():
            needs = {rank: own[name] for rank, own in enumerate(everyone) if name in own}
            if needs:
                haves = {rank: own[name][2] for rank, own in enumerate(self.holdings) if name in own}
                assert isinstance(entry.dtype, torch.dtype)
                spreads[name] = Spread(entry.shape, entry.dtype.itemsize, haves, needs)
        way, rank = transfer(spreads, self.bucket), own_place(ranks)
        for send in way.local:
            if send.target == rank:
                _within(need, send).copy_(_within(self.have, send))
        for i, sends in enumerate(way.rounds, 1):
            assert ranks is not None
            # Who has ended or left is heard of here: in a round each rank waits for those alone that it exchanges with.
            meet(ranks.channel, f"round {i} of {len(way.rounds)} of a move")
            _round([x for x in sends if rank in (x.source, x.target)], self.have, need, ranks)


def _blocks(boxes: Sequence[Box]) -> list[Block]:
    return [box.block for box in boxes]


def _within(boxes: Boxes, send: Send) -> Tensor:
    """The memory of a block, in the box that holds it."""
    parts = (box.within(send.block) for box in boxes[send.name])
    return next(x.tensor for x in parts if x is not None and x.tensor.numel() == send.block.elements)


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
