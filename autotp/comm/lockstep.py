"""Ranks in step: before a rank begins what others must begin too, all of them compare what that is.

A forward, a backward and every exchange of objects begins with one turn of the group's channel (`channel.py`), in
which each rank says in words what it is about to do. Where the words differ, all ranks raise the same error, and no
collective has begun. So a backward that one rank leaves out meets the next forward here, and not in an all-reduce.
"""

from __future__ import annotations

import math
import os
import re
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autotp import compat
from autotp.errors import RankError
from autotp.log import log

from . import waiting
from .channel import Channel, Collective
from .sockets import connected
from .wording import by_value

WHAT = 160  # characters of what a rank is about to do
MOST = 64  # ranks that are all connected to each other
HEAD = struct.Struct("!H")
COMMUNICATION = re.compile(r"gloo|nccl|connection|timed? ?out|peer|socket|rendezvous|abort", re.IGNORECASE)
LATE = re.compile(r"timed? ?out", re.IGNORECASE)
CAUSES = (
    "All ranks of a tp group must make the same calls in the same order, with inputs of the same shapes, in the same "
    "mode, and update the weights together. Usual causes: a batch that is skipped on one rank (a try/except, an empty "
    "batch, a loss that is not finite), a sampler that gives tp ranks different batches, code under `if rank == 0`. "
    "With dp this holds for all ranks, but for lengths and values of the inputs; each passes as many examples."
)

_open: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()
_by_name: dict[str, Channel] = {}


def channel_of(group: ProcessGroup, rank: int, size: int, device: torch.device, axes: str = "tp") -> Channel | None:
    """The channel of a group; made, a collective call, where there is none yet.

    Args:
        group: of the tp ranks. rank, size: this rank's place in it, and how many there are.
        device: of this rank, for collectives where ranks cannot connect.

    Returns: None for a group that is too large for one, and for torch's fake groups, whose other ranks do not exist.
    """
    if size > MOST or size == 1:
        return None
    channel = _open.get(group)
    if channel is None:
        if dist.get_backend(group) == "fake":
            return None
        timeout, peers = _timeout(weakref.ref(group), device), connected(group, rank, size)
        if peers is None:
            log.warning("the ranks cannot connect to each other: none will say which one it waits for")
            channel = Collective(rank, size, timeout, group, device)
        else:
            channel = Channel(rank, size, timeout, *peers)
            waiting.watch(channel)
        _open[group] = _by_name[group.group_name] = channel
        channel.group, channel.axes = group.group_name, axes
        weakref.finalize(group, channel.close)
    return channel


def _timeout(group: weakref.ref[ProcessGroup], device: torch.device) -> Callable[[], float]:
    return lambda: math.inf if (alive := group()) is None else compat.group_timeout(alive, device)


def meet(channel: Channel | None, what: str, more: bytes = b"") -> list[bytes]:
    """Make sure that every rank is about to do the same, and hear what else each one has to say. A collective call.

    Args:
        channel: None where nothing is compared.
        what: what this rank is about to do, in words that are the same on all ranks.
        more: this rank's, of any content.

    Returns: every rank's `more`, by rank.

    Raises:
        RankError: the ranks are about to do different things, or one of them is gone.
    """
    if channel is None:
        return [more]
    text = what.encode()[:WHAT]
    mine = HEAD.pack(len(text)) + text + more
    everyone = channel.exchange(what, mine)
    if everyone.count(mine) == len(everyone):  # as nearly always: then nothing differs
        return [more] * len(everyone)
    texts = [message[HEAD.size : HEAD.size + HEAD.unpack_from(message)[0]] for message in everyone]
    if any(other != text for other in texts):
        channel.leave()
        differences = by_value([x.decode(errors="replace") for x in texts])
        raise RankError(f"The {channel.size} {channel.axes} ranks have parted: {differences}.\n{CAUSES}")
    return [message[HEAD.size + len(text) :] for message in everyone]


def meet_in(group: str, what: str) -> None:
    """`meet` of the ranks of the group of this name; nothing where the ranks of that group are not compared."""
    meet(_by_name.get(group), what)


def lost(error: Exception, group: str) -> None:
    """Where an error is one of communication: raise the one that names the rank that is gone in its place.

    Args:
        error: that a collective raised.
        group: the name of its process group.

    Raises:
        RankError: caused by `error`.
    """
    channel = _by_name.get(group)
    if channel is None or isinstance(error, torch.OutOfMemoryError) or not COMMUNICATION.search(str(error)):
        return
    what = channel.doing[0]
    absent = channel.ended()
    if absent and not LATE.search(str(error)):
        raise channel.error(what, absent, "ended") from error
    others = [rank for rank in range(channel.size) if rank != channel.rank and rank not in absent]
    replies = channel.ask(others)
    silent = [rank for rank in others if rank not in replies]  # one that was late ended others, which name it too
    if absent and not silent:
        raise channel.error(what, absent, "ended") from error
    raise channel.error(what, silent or others, "did not come to a collective in time") from error


def lost_in_backward(error: Exception) -> None:
    """`lost` for whatever a backward raised: collectives of torch's data parallelism, and of what Inductor compiled.

    Raises:
        RankError: caused by `error`.
    """
    under_way = [channel for channel in list(_open.values()) if channel.running]
    if under_way and not isinstance(error, RankError):
        lost(error, max(under_way, key=lambda channel: channel.doing[1]).group)


def _forked() -> None:
    """In a child process: let go of the connections, so that others see it when this rank's own process ends."""
    for channel in list(_open.values()):
        channel.drop()
    _open.clear()
    _by_name.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
