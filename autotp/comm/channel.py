"""Small messages between the ranks of a group, beside its collectives.

Ranks take turns: in each, every rank sends one message to every other and takes one from each. Messages are of any kind
and length, so ranks that do different things meet here, and hear of it, where two collectives that do not fit would
hang, abort the process, or give numbers. Two ranks have one connection: the one that is silent says who is late, the
one that is closed who has gone, and what a rank did last is its turn before, on which all had agreed.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from autotp.errors import RankError
from autotp.log import log

MAX_CHARACTERS = 200  # characters of one rank's value in a message
WAIT = "AUTOTP_WAIT_LOG_S"  # seconds of waiting after which it is logged
GRACE_SECONDS = 2.0  # seconds in which a rank is seen to end, or to leave what has failed
IN_STEP_SECONDS = 0.05  # seconds in which a rank that is in step has sent its message
SEND_SECONDS = 60.0  # seconds that sending may take: as good as never
FRAME = struct.Struct("!IQB")  # length of the message, number of the turn, kind
SAYS, LEAVES = 0, 1


def wait_limit() -> float:
    """Return the seconds of waiting after which a line is logged: `AUTOTP_WAIT_LOG_S`, by default 30."""
    try:
        return max(0.05, float(os.environ.get(WAIT, "30")))
    except ValueError:
        return 30.0


@dataclass(eq=False)
class Link:
    """A connection to one other rank: numbered messages in both directions, for all groups that the two are in.

    Attributes:
        peer: the socket. rank: the other one's, in the world.
        turn: number of the latest turn of the two.
        departure: number of the turn at which either left what it was doing, and `Channel.begun` at that time.
        last: the latest turn that both came to, in words.
        absent: whether its process has ended. channels: how many use it.
    """

    peer: socket.socket
    rank: int
    turn: int = 0
    departure: tuple[int, int] = (-1, 0)
    last: str = ""
    absent: bool = False
    channels: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    def send(self, kind: int, message: bytes) -> None:
        """Send the message of the next turn.

        Args:
            kind: `SAYS`, or `LEAVES` where this rank leaves what the turn would be of.
        """
        self.turn += 1
        if kind == LEAVES:
            self.departure = self.turn, Channel.begun
            self.receive()  # where all ranks leave, and again and again, nobody else takes what has come
        try:
            _send(self.peer, FRAME.pack(len(message), self.turn, kind) + message)
        except OSError:
            self.absent = True

    def next(self) -> tuple[int, bytes] | None:
        """Take kind and text of this turn's message, if it has come."""
        if not self.holds():
            return None
        length, self.turn, kind = FRAME.unpack_from(self.buffer)
        message = bytes(self.buffer[FRAME.size : FRAME.size + length])
        del self.buffer[: FRAME.size + length]
        if kind == LEAVES:
            self.departure = self.turn, Channel.begun
        return kind, message

    def receive(self) -> bool:
        """Take what has come, without waiting; return whether the other end is still there."""
        try:
            data = self.peer.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self.absent = self.absent or not data
        self.buffer += data
        return bool(data)

    def holds(self) -> bool:
        """Return whether this turn's message has come; what an interrupted turn left is dropped."""
        while len(self.buffer) >= FRAME.size:
            length, turn, _ = FRAME.unpack_from(self.buffer)
            if len(self.buffer) < FRAME.size + length:
                return False
            if turn >= self.turn:
                return True
            del self.buffer[: FRAME.size + length]
        return False


class Channel:
    """The turns of the ranks of one group: in each, all of them exchange messages.

    Attributes:
        rank, size: this process's place in the group.
        timeout: returns the group's time-out in seconds, which may be changed at any time.
        links: connections to the other ranks, by rank.
        doing: what this rank is about to do or does, in words; began: since when; running: whether it does that by now.
        modules: how many sharded modules use it. group: the name of its process group; axes: the mesh's that it spans.
        around: channels of the same modules over more axes, which have all its ranks and others beside them.
        begun: exchanges that this process has begun, by any channel, and outermost turns (`turn.py`).
        room: bytes of a message that every connection holds, so that none waits for a reader.
    """

    begun = 0
    room = 1 << 15

    def __init__(self, rank: int, size: int, timeout: Callable[[], float], links: dict[int, Link]) -> None:
        self.rank, self.size, self.timeout, self.links = rank, size, timeout, links
        self.doing, self.began, self.running = "first call", 0.0, False
        self.modules = 0
        self.group, self.axes = "", "tp"
        self.around: weakref.WeakSet[Channel] = weakref.WeakSet()
        for link in links.values():
            link.channels += 1

    @property
    def others(self) -> set[int]:
        """The other ranks, by their numbers in the world."""
        return {link.rank for link in self.links.values()}

    @property
    def absent(self) -> set[int]:
        """Ranks whose process has ended."""
        return {rank for rank, link in self.links.items() if link.absent}

    def exchange(self, what: str, message: bytes) -> list[bytes]:
        """Exchange messages with every rank; return all of them, by rank. A collective call.

        Args:
            what: the turn in words, for who waits.
            message: this rank's.

        Raises:
            RankError: a rank has ended, did not come within the group's time-out, or left what it was doing.
        """
        self.doing, self.running = what, False
        Channel.begun += 1
        for link in self.links.values():
            link.send(SAYS, message)
        messages, causes = [], {}
        for rank in range(self.size):
            kind, text = self._receive(rank, what) if rank != self.rank else (SAYS, message)
            if kind == LEAVES:
                causes[rank] = text.decode(errors="replace")
            messages.append(text)
        if causes:
            raise self.left_error(what, causes)
        for link in self.links.values():
            link.last = what
        self.began, self.running = time.monotonic(), True
        return messages

    def leave(self) -> None:
        """Note that what the last turn was for is done."""
        self.running = False

    def _receive(self, rank: int, what: str) -> tuple[int, bytes]:
        """Wait for one rank's message of this turn."""
        began, link = time.monotonic(), self.links[rank]
        message = link.next()
        if message is None and _ready(link.peer, IN_STEP_SECONDS):  # as nearly always: no limit is asked for
            message = self._take(rank, what)
        if message is not None:
            return message
        notice = limit = wait_limit()
        timeout = self.timeout()
        while message is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                raise self.error(what, [rank], f"did not come within the {timeout:g} s of the process group's time-out")
            if waited >= notice:
                self._notice(rank, what, waited)
                notice = max(2 * notice, waited + limit)
                message = link.next()
            elif _ready(link.peer, min(notice, timeout) - waited + 1e-3):
                message = self._take(rank, what)
        return message

    def _take(self, rank: int, what: str) -> tuple[int, bytes] | None:
        """Receive from one rank; return its message of this turn where all of it has come."""
        link = self.links[rank]
        if not link.receive():
            raise self.error(what, self.ended(), "ended")
        return link.next()

    def late(self) -> list[int]:
        """List the ranks of which no message of this turn has come."""
        for link in self.links.values():
            link.receive()
        return [rank for rank, link in self.links.items() if not link.holds()]

    def _notice(self, rank: int, what: str, waited: float) -> None:
        """Log for whom this rank waits."""
        if late := [other for other in self.late() if other >= rank]:  # what those before it said is taken
            log.warning(
                "rank %d of %d has waited %.0f s at the %s, for %s", self.rank, self.size, waited, what, self.last(late)
            )

    def last(self, ranks: Sequence[int]) -> str:
        """Describe the latest turn of each of these ranks."""
        texts = []
        for rank in ranks:
            last = self.links[rank].last
            turn = f"whose latest turn was the {last}" if last else "which has come to no turn yet"
            texts.append(f"rank {rank}, {'which has ended' if rank in self.absent else turn}")
        return "; ".join(texts)

    def ended(self, grace: float = GRACE_SECONDS) -> list[int]:
        """List the ranks whose process has ended, as far as that is seen within a moment."""
        end = time.monotonic() + grace
        while True:
            for link in self.links.values():
                link.absent = link.absent or _closed(link.peer)
            if self.absent or time.monotonic() >= end:
                return sorted(self.absent)
            time.sleep(0.02)

    def silent(self, ranks: Collection[int]) -> list[int]:
        """Return those of these ranks of which nothing comes within a moment."""
        end = time.monotonic() + GRACE_SECONDS
        while (late := [rank for rank in self.late() if rank in ranks]) and time.monotonic() < end:
            time.sleep(0.02)
        return late

    def error(self, what: str, ranks: Sequence[int], how: str) -> RankError:
        """Make the error for ranks that are not present."""
        names = f"{self.axes} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        last = "" if how == "ended" else f"\n  {self.last(ranks)}"
        at = "in" if self.running else "at"
        return RankError(
            f"{names} of {self.size} {how}, and this rank ({self.rank}) waits for it {at} the {what}.{last}\n"
            "Look at what that rank printed last; a job launcher such as torchrun ends all ranks when one fails."
        )

    def left_error(self, what: str, causes: Mapping[int, str]) -> RankError:
        """Make the error for ranks whose work an exception ended; `causes` says for each what it left and why."""
        texts = "\n".join(f"  {self.axes} rank {rank} of {self.size} left {text}" for rank, text in causes.items())
        return RankError(
            f"This rank ({self.rank}) stops at the {what}, for others have stopped:\n{texts}\n"
            "What was done before that stays. The next call runs, where all ranks make it."
        )

    def close(self) -> None:
        """Release the connections, and end those that nobody else uses."""
        for link in self.links.values():
            link.channels -= 1
            if not link.channels:
                link.peer.close()

    def drop(self) -> None:
        """Close the connections in a process that only inherited them."""
        for link in self.links.values():
            link.peer.close()


def _send(peer: socket.socket, data: bytes) -> None:
    """Send all the data through a connection that does not block; a message is small, and the other end holds it."""
    while data:
        try:
            data = data[peer.send(data) :]
        except BlockingIOError:
            if not _ready(peer, SEND_SECONDS, select.POLLOUT):
                raise TimeoutError("the other end takes nothing") from None


def _ready(peer: socket.socket, seconds: float, event: int = select.POLLIN) -> bool:
    """Wait until something has come, or the connection has ended; return whether that was within so many seconds."""
    if peer.fileno() < 0:
        return True  # closed on this side: whoever reads it sees that
    poll = select.poll()
    poll.register(peer, event)
    return bool(poll.poll(math.ceil(1e3 * seconds)))


def _closed(peer: socket.socket) -> bool:
    """Return whether the other end is closed; messages that wait to be read stay."""
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def by_value(values: Sequence[str]) -> str:
    """Say which ranks have which value: `ranks 0-2: abc, rank 3: def`."""
    return ", ".join(
        f"{rank_list([rank for rank, other in enumerate(values) if other == value])}: {_short(value)}"
        for value in dict.fromkeys(values)
    )


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2-4`; `ranks` ascend."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    ranges = []
    for first, last in runs:
        ranges.append(str(first) if first == last else f"{first}-{last}")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranges)}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."


# ---- connections -----------------------------------------------------------------------------------------------------


CONNECT_SECONDS = 10.0  # seconds that making a connection may take
HELLO = struct.Struct("!32sI")  # the secret, the rank that connects

Peers = dict[int, socket.socket]


def connected(group: ProcessGroup, rank: int, size: int) -> Peers | None:
    """Connect this rank to each other rank. A collective call.

    Args:
        group: of the tp ranks. rank, size: this rank's place in it, and how many there are.

    Returns: None, on all ranks, where some rank could not connect: one behind a firewall, for instance.
    """
    hosts = _gathered(group, size, _host())
    secret = secrets.token_bytes(32)
    server = _listening("127.0.0.1" if len(set(hosts)) == 1 else _address(), size)
    with contextlib.ExitStack() as stack:
        if server is not None:
            stack.enter_context(server)
        addresses = _gathered(group, size, None if server is None else (*server.getsockname()[:2], secret))
        peers: Peers = {}
        fine = None not in addresses and _meet(peers, server, addresses, rank, size)
        if all(_gathered(group, size, fine)):
            return peers
    for peer in peers.values():
        peer.close()
    return None


def _meet(peers: Peers, server: Any, addresses: list[Any], rank: int, size: int) -> bool:
    """Connect to the ranks before this one and accept those after it; return whether all of them came."""
    try:
        for other in range(rank):
            host, port, secret = addresses[other]
            peers[other] = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            peers[other].sendall(HELLO.pack(secret, rank))
        end = time.monotonic() + CONNECT_SECONDS
        while len(peers) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            _welcome(peers, server.accept()[0], addresses[rank][2])
    except OSError:
        return False
    for peer in peers.values():
        _prepare(peer)
    return True


def _welcome(peers: Peers, peer: socket.socket, secret: bytes) -> None:
    """Keep a connection of a rank of this group; drop a stranger's."""
    peer.settimeout(CONNECT_SECONDS)
    hello = b""
    while len(hello) < HELLO.size and (data := peer.recv(HELLO.size - len(hello))):
        hello += data
    if len(hello) == HELLO.size and hmac.compare_digest(hello[:32], secret):
        peers[HELLO.unpack(hello)[1]] = peer
    else:
        peer.close()


def _prepare(peer: socket.socket) -> None:
    """Configure a connection to send at once, and to notice within half a minute that the other machine is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _gathered(group: ProcessGroup, size: int, mine: object) -> list[Any]:
    everyone: list[Any] = [None] * size
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:  # of communication: nobody can be asked yet who it is
        raise RankError(f"The {size} ranks cannot meet: one has ended, or does not come. {error}") from error
    return everyone


def _host() -> tuple[str, ...]:
    """Return kernel and network namespace: equal on ranks that reach each other by the loopback address."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return (socket.gethostname(),)


def _address() -> str:
    """Return this machine's address on the way to the master; its name's where there is no master."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))  # sends nothing
        if not (name := probe.getsockname()[0]).startswith("127."):
            return name
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _listening(address: str, size: int) -> socket.socket | None:
    try:
        return socket.create_server((address, 0), backlog=size) if address else None
    except OSError:
        return None
