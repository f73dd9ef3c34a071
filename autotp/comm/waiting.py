"""Who waits for whom: a thread of each process that answers what its rank is doing, and logs when it waits for long.

A rank that is stopped, or whose process has ended, does not answer. One that captures, compiles, saves or evaluates
says so, by the place where it is; that is no error however long it takes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import socket
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

from autotp.log import log

from .channel import GRACE, Channel, wait_limit

ASK, ANSWER = 0, 1
HEAD = struct.Struct("!BI")  # kind, length of the text
HERE = str(Path(__file__).resolve().parents[1])
LIBRARIES = (HERE, str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<")


class Watch:
    """The thread of this process, for all channels."""

    def __init__(self) -> None:
        self.asking: list[Asking] = []
        self.selector = selectors.DefaultSelector()
        threading.Thread(target=self._run, name="autotp-watch", daemon=True).start()

    def add(self, channel: Channel) -> None:
        """Watch a channel."""
        asking = Asking(channel)
        channel.ask = asking.ask
        self.asking.append(asking)
        for rank, peer in channel.asks.items():
            peer.settimeout(GRACE)
            self.selector.register(peer, selectors.EVENT_READ, (asking, rank))

    def _run(self) -> None:
        while True:
            if self.selector.get_map():
                for key, _ in self.selector.select(min(1.0, wait_limit() / 4)):
                    asking, rank = key.data
                    if not asking.read(rank):
                        self._forget(asking, rank)
            else:
                time.sleep(1.0)
            for asking in list(self.asking):
                asking.look()

    def _forget(self, asking: Asking, rank: int) -> None:
        """A connection that has ended."""
        self.selector.unregister(asking.peers[rank])
        asking.peers.pop(rank).close()
        if not asking.peers:
            self.asking.remove(asking)


class Asking:
    """The questions of one channel, and this rank's answers."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.peers = channel, dict(channel.asks)
        self.replies: dict[int, str] = {}
        self.condition = threading.Condition()
        self.stuck: tuple[object, float, float] = (None, 0.0, 0.0)

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """The answers of these ranks; those that do not answer at once are absent.

        Args:
            ranks: whom to ask.
        """
        with self.condition:
            for rank in ranks:
                self.replies.pop(rank, None)
            for rank in ranks:
                with contextlib.suppress(OSError, KeyError):
                    self.peers[rank].sendall(HEAD.pack(ASK, 0))
            if threading.current_thread().name == "autotp-watch":
                return self._listen(ranks)
            self.condition.wait_for(lambda: all(rank in self.replies for rank in ranks), GRACE)
            return dict(self.replies)

    def _listen(self, ranks: Sequence[int]) -> dict[int, str]:
        """Wait for answers where this is the thread that reads them."""
        end = time.monotonic() + GRACE
        with selectors.DefaultSelector() as waiting:
            for rank in self.peers:
                waiting.register(self.peers[rank], selectors.EVENT_READ, rank)
            while any(rank not in self.replies for rank in ranks) and (seconds := end - time.monotonic()) > 0:
                for key, _ in waiting.select(seconds):
                    if not self.read(key.data):
                        waiting.unregister(key.fileobj)
        return dict(self.replies)

    def read(self, rank: int) -> bool:
        """Take a question or an answer; whether there can be more of them.

        Args:
            rank: whose connection to read.
        """
        try:
            kind, length = HEAD.unpack(_exactly(self.peers[rank], HEAD.size))
            text = _exactly(self.peers[rank], length).decode(errors="replace")
            if kind == ASK:
                data = doing(self.channel).encode()[:400]
                self.peers[rank].sendall(HEAD.pack(ANSWER, len(data)) + data)
            else:
                with self.condition:
                    self.replies[rank] = text
                    self.condition.notify_all()
        except (OSError, struct.error):
            return False
        return True

    def look(self) -> None:
        """Log a collective that this rank has waited in for long, and what the others are doing."""
        channel = self.channel
        inside = collective(channel.doing[2], channel.group) if channel.running else None
        now = time.monotonic()
        if inside is None or inside[0] != self.stuck[0]:
            self.stuck = (inside and inside[0], now, wait_limit())
            return
        waited = now - self.stuck[1]
        if waited >= self.stuck[2]:
            self.stuck = (inside[0], self.stuck[1], 2 * waited)
            others = list(channel.asks)
            log.warning(
                "rank %d of %d has waited %.0f s in %s, in the %s; the others: %s",
                channel.rank, channel.size, waited, inside[1], channel.doing[0], channel.answers(others),
            )  # fmt: skip


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise OSError
        data += more
    return data


def doing(channel: Channel) -> str:
    """This rank's answer: its latest turn, and the line of the user's code where it is."""
    what, since, thread = channel.doing
    inside = collective(thread, channel.group) if channel.running else None
    state = "since it began the " if channel.running else "at or after the "
    where = f", in {inside[1]}" if inside else ""
    return f"{time.monotonic() - since:.0f} s {state}{what}{where}{_place(thread)}"


def stack(thread: int) -> list[FrameType]:
    """The frames of a thread, innermost first.

    No garbage is collected meanwhile: Python 3.11 collects within `f_back`, what is collected may let the thread run
    on, and the frame of which `f_back` is making an object has ended by then: a segmentation fault.

    Args:
        thread: identity of the thread.
    """
    collects, frames = gc.isenabled(), []
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()
    return frames


def _place(thread: int) -> str:
    """The innermost line that is not a library's."""
    for frame in stack(thread):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) and "site-packages" not in file:
            return f", at {os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def collective(thread: int, group: str) -> tuple[object, str] | None:
    """A mark of the collective of this group that a thread is in, and the collective and its module in words.

    Args:
        thread: identity of the thread that may wait. group: name of its process group.
    """
    primitive, words, steps = None, "", []
    for frame in stack(thread):
        file = frame.f_code.co_filename
        ours = file.startswith(HERE)
        inner = frame.f_locals if ours else {}  # others run on meanwhile: reading theirs has crashed
        here = ours and file.endswith("collectives.py")
        if here and inner.get("group", group) != group:
            return None
        if primitive is None and here:
            primitive, words = (id(frame), frame.f_lasti), str(inner.get("primitive", "a collective"))
        elif primitive is None and "torchinductor" in file:
            primitive, words = (id(frame), frame.f_lasti), "a compiled part"
        elif frame.f_code.co_name == "call" and "steps" in inner:
            steps[:0] = inner["steps"]
    if primitive is None:
        return None
    return primitive, f"{words} of {'.'.join(steps)}" if steps else words


_watches: dict[int, Watch] = {}  # by process: a child has no thread of its parent's


def watch(channel: Channel) -> None:
    """Answer the other ranks' questions about this one, and log when it waits for long."""
    if os.getpid() not in _watches:
        _watches.clear()
        _watches[os.getpid()] = Watch()
    _watches[os.getpid()].add(channel)
