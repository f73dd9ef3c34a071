"""Lockstep of ranks: before a rank begins what others must begin too, all of them compare what that is.

A forward, a backward and every exchange of objects begins with one turn of the group's channel (`channel.py`), in
which each rank says in words what it is about to do. Where the words differ, all ranks raise the same error, and no
collective has begun. So a backward that one rank leaves out meets the next forward here, and not in an all-reduce.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autotp import compat
from autotp.errors import RankError
from autotp.text import message_of

from .channel import Channel, Link, Peers, by_value, connected
from .turn import CAUSE_CHARACTERS, Turn, depart, forked, joined, release

WORD_CHARACTERS = 160  # characters of what a rank is about to do
MAX_RANKS = 64  # ranks that are all connected to each other
COMMUNICATION = re.compile(r"gloo|nccl|connection|timed? ?out|peer|socket|rendezvous|abort", re.IGNORECASE)
LATE = re.compile(r"timed? ?out", re.IGNORECASE)
CAUSES = (
    "All ranks of a tp group must make the same calls in the same order, with inputs of the same shapes, in the same "
    "mode, and update the weights together. Usual causes: a batch that is skipped on one rank (a try/except, an empty "
    "batch, a loss that is not finite), a sampler that gives tp ranks different batches, code under `if rank == 0`, "
    "threads whose calls come in another order on each rank. "
    "With dp this holds for all ranks, but for lengths and values of the inputs; each passes as many examples."
)
UNCONNECTED = (
    "The {} ranks cannot connect to each other by TCP, by which they compare what they are about to do. Allow "
    "connections between their machines on any port, in the network by which these reach MASTER_ADDR: gloo and NCCL "
    "need them too."
)

around_backwards: list[Callable[[], contextlib.AbstractContextManager[None]]] = []  # entered by each backward
_open: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()
_by_name: dict[str, Channel] = {}
_by_rank: dict[int, Link] = {}  # by the other one's rank in the world


def channel_of(group: ProcessGroup, rank: int, size: int, device: torch.device, axes: str = "tp") -> Channel | None:
    """Return the channel of a group; where there is none yet it is made, by a collective call.

    Args:
        group: of the tp ranks. rank, size: this rank's place in it, and how many there are.
        device: of this rank, whose time-out holds.

    Returns: None for a group that is too large for one, and for torch's fake groups, whose other ranks do not exist.

    Raises:
        RankError: ranks cannot connect to each other.
    """
    if size > MAX_RANKS or size == 1:
        return None
    channel = _open.get(group)
    if channel is None:
        if dist.get_backend(group) == "fake":
            return None
        timeout, peers = _timeout(weakref.ref(group), device), connected(group, rank, size)
        if peers is None:
            raise RankError(UNCONNECTED.format(size))
        channel = Channel(rank, size, timeout, _links(group, peers, size))
        _open[group] = _by_name[group.group_name] = channel
        channel.group, channel.axes = group.group_name, axes
        weakref.finalize(group, channel.close)
    return channel


def _timeout(group: weakref.ref[ProcessGroup], device: torch.device) -> Callable[[], float]:
    return lambda: math.inf if (alive := group()) is None else compat.group_timeout(alive, device)


def _links(group: ProcessGroup, peers: Peers, size: int) -> dict[int, Link]:
    """Link to the ranks of a group, by links that two ranks have already, else over these connections. Collective.

    Where ranks meet for the first time in a group, what earlier turns left unread is dropped.
    """
    world, here = dist.get_process_group_ranks(group), dist.get_rank()
    mine = {rank: link.turn for rank, link in _by_rank.items() if not link.absent and link.channels}
    theirs: list[Any] = [None] * size
    dist.all_gather_object(theirs, mine, group=group)
    links = {}
    for rank, peer in peers.items():
        other, turns = world[rank], theirs[rank]
        if other in mine and here in turns:
            peer.close()
            links[rank] = _by_rank[other]
            links[rank].turn = max(mine[other], turns[here])
        else:
            peer.setblocking(False)
            links[rank] = _by_rank[other] = Link(peer, other)
    return links


def meet(channel: Channel | None, what: str, payload: bytes = b"", turn: bool = True) -> list[bytes]:
    """Make sure that every rank is about to do the same, and exchange payloads. A collective call.

    Args:
        channel: None where nothing is compared.
        what: what this rank is about to do, in words that are the same on all ranks.
        payload: this rank's, of any content.
        turn: whether this may be a turn by itself; not so at the end of a backward, which torch may reach in a thread
            of its own.

    Returns: every rank's payload, by rank.

    Raises:
        RankError: the ranks are about to do different things, or one of them is gone or has left a call.
    """
    if channel is None:
        return [payload]
    # The axes go with the words: ranks that meet in groups of other axes would else compare messages of other calls.
    text = b"\0".join((what.encode()[:WORD_CHARACTERS], channel.axes.encode(), b""))
    with _turn(what, channel) if turn else nullcontext():
        everyone = channel.exchange(what, text + payload)
        if everyone.count(text + payload) == len(everyone):  # as nearly always: then nothing differs
            return [payload] * len(everyone)
        # What ranks are about to do must be one; payloads may differ, and the caller compares them.
        if not all(message.startswith(text) for message in everyone):
            channel.leave()
            words = [message.decode(errors="replace").split("\0")[:2] for message in everyone]
            axes = {over for _, over in words}
            parts = 2 if len(axes) > 1 else 1
            differences = by_value([" over ".join(word[:parts]) for word in words])
            raise RankError(f"The {channel.size} {channel.axes} ranks have parted: {differences}.\n{CAUSES}")
        return [message[len(text) :] for message in everyone]


def _turn(what: str, *channels: Channel) -> AbstractContextManager[None]:
    """Return a turn; within a backward none, for the backward's caller has it, perhaps in another thread."""
    if compat.graph_task() < 0:
        return Turn(what, *channels)
    for channel in channels:
        joined(channel)
    return nullcontext()


def end_hooks(channel: Channel | None, what: str, turn: bool = True) -> None:
    """Raise on every rank what a hook raised on any amid the collectives of a call. A collective call.

    Args:
        channel: of the ranks; None for one alone. what: the call in words. turn: as `meet` has it.

    Raises:
        Exception: the hook's, on its rank.
        RankError: on the others; on all, where hooks have changed values on some ranks only.
    """
    error, changes = release()
    text = "" if error is None else message_of(error)
    messages = meet(channel, f"end of {what}", pickle.dumps((changes, text[:CAUSE_CHARACTERS])), turn)
    if error is not None:
        raise error
    counts, texts = zip(*map(pickle.loads, messages), strict=True)
    causes = {rank: f"a hook, by {cause}" for rank, cause in enumerate(texts) if cause}
    if channel is None:
        return
    if causes:
        raise channel.left_error(f"end of {what}", causes)
    if len(set(counts)) > 1:
        differences = by_value(list(map(str, counts)))
        raise RankError(
            f"In {what} hooks gave or wrote other values than they saw, and not on every {channel.axes} rank, so its "
            f"numbers are of no use: hooks that did so: {differences}. "
            "Register such hooks on every rank; one that looks only returns None."
        )


@contextlib.contextmanager
def meeting_in(group: str, what: str) -> Iterator[None]:
    """Wrap a collective that torch begins in a turn, in which ranks `meet` first and an error names who is lost.

    Other threads wait until it has begun: their calls have collectives too.

    Args:
        group: the name of its process group, whose ranks may be ones that are not compared. what: it is, in words.

    Raises:
        RankError: as `meet` does, or in the place of what the collective raised.
    """
    channel = _by_name.get(group)
    with _turn(what, *filter(None, [channel])):
        meet(channel, what)
        try:
            yield
        except RuntimeError as error:
            lost(error, group)
            raise


def meet_everywhere(what: str) -> None:
    """Have all ranks of the world `meet` before a library's own collective, if they share a channel."""
    if dist.is_initialized():
        of_all = (channel for channel in list(_open.values()) if channel.size == dist.get_world_size())
        meet(next(of_all, None), what)


def lost(error: Exception, group: str) -> None:
    """Raise, in place of an error of communication, one that names the rank that is lost.

    Args:
        error: that a collective raised.
        group: the name of its process group.

    Raises:
        RankError: caused by `error`.
    """
    channel = _by_name.get(group)
    if channel is None or isinstance(error, torch.OutOfMemoryError) or not COMMUNICATION.search(str(error)):
        return
    # A process that has ended is the cause, unless a time-out says that somebody was late before it ended.
    what = channel.doing
    absent = channel.ended()
    if absent and not LATE.search(str(error)):
        raise channel.error(what, absent, "ended") from error
    # Whoever was in the collective sees it fail too, and leaves: one that is silent was late, and ended it for all.
    departures = {*absent, *(rank for rank, link in channel.links.items() if link.departure[0] == link.turn)}
    depart(f"the {what}, by {message_of(error)}", channel)
    silent = channel.silent({*channel.links} - departures)
    if absent and not silent:
        raise channel.error(what, absent, "ended") from error
    others = [rank for rank in range(channel.size) if rank != channel.rank and rank not in absent]
    raise channel.error(what, silent or others, "did not come to a collective in time") from error


@contextlib.contextmanager
def whole_backward() -> Iterator[None]:
    """Wrap a backward of this process in a turn, and name the lost rank in errors of communication.

    Collectives of torch's data parallelism, and of what Inductor compiled, name none.

    Raises:
        RankError: in the place of what such a collective raised.
    """
    with _turn("a backward"):
        try:
            with contextlib.ExitStack() as stack:
                for around in around_backwards:
                    stack.enter_context(around())
                yield
        except BaseException as error:
            under_way = [channel for channel in list(_open.values()) if channel.running]
            if under_way and isinstance(error, RuntimeError) and not isinstance(error, RankError):
                lost(error, max(under_way, key=lambda channel: channel.began).group)
            raise


def _forked() -> None:
    """Release the connections in a child process, so that others see it when this rank's own process ends."""
    for channel in list(_open.values()):
        channel.drop()
    _open.clear()
    _by_name.clear()
    _by_rank.clear()
    forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
