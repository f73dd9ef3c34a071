"""Connections between ranks beside the collectives of their process groups.

Two ranks have one for their turns, in whatever groups they meet. Ranks of one machine meet on its loopback address.
Elsewhere a rank listens on the address by which it reaches the master, as routing has it. Who connects shows a secret
that went through the process group.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from autotp.errors import RankError

CONNECT_SECONDS = 10.0  # seconds that making a connection may take
HELLO = struct.Struct("!32sI")  # the secret, the rank that connects

Peers = dict[int, socket.socket]


def connected(group: ProcessGroup, rank: int, size: int) -> Peers | None:
    """The connections of this rank, one to each other rank. A collective call.

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
    """Connect to the ranks before this one, and be connected to by those after it; whether all of them came."""
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
    while len(hello) < HELLO.size and (more := peer.recv(HELLO.size - len(hello))):
        hello += more
    if len(hello) == HELLO.size and hmac.compare_digest(hello[:32], secret):
        peers[HELLO.unpack(hello)[1]] = peer
    else:
        peer.close()


def _prepare(peer: socket.socket) -> None:
    """Send at once; and notice within half a minute that the other machine is gone."""
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
    """Kernel and network namespace: equal on ranks that reach each other by the loopback address."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return (socket.gethostname(),)


def _address() -> str:
    """This machine's address on the way to the master; its name's where there is no master."""
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
