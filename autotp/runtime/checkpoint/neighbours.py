"""Second copies of what ranks keep, on other nodes: which rank has whose, and files sent there."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from socket import socket

from autotp.comm.ranks import Ranks
from autotp.comm.sockets import Peers, connected
from autotp.errors import RankError, StateError

from .shared_memory import Slot

HEAD = struct.Struct("!QQ")  # bytes of the record, and of the file
SECONDS = 600.0  # that a connection may be silent: as good as never


def place_of(folder: Path) -> tuple[str, int, int]:
    """Name the memory that a folder lies in: equal on ranks that see the same files."""
    status = os.stat(folder)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else "", status.st_dev, status.st_ino


def neighbours(places: Sequence[Hashable]) -> list[int]:
    """Return of each rank which one holds its second copy: on the next node where there are several, else the next.

    Args:
        places: of each rank, the memory that it is in.
    """
    nodes = list(dict.fromkeys(places))
    out = []
    for rank, place in enumerate(places):
        index = places[:rank].count(place)
        to = nodes[(nodes.index(place) + 1) % len(nodes)]
        there = [other for other, node in enumerate(places) if node == to]
        out.append(there[(index + (to == place)) % len(there)])
    return out


def connect(ranks: Ranks) -> Peers:
    """Connect to all other ranks, beside the connections that they take turns by. A collective call."""
    peers = connected(ranks.group, ranks.rank, ranks.tp)
    if peers is None:
        raise RankError("the ranks cannot connect to each other by TCP, to send each other what memory holds.")
    for peer in peers.values():
        peer.settimeout(SECONDS)
    return peers


def send(peer: socket, record: str, slot: memoryview) -> None:
    """Send a file and its record."""
    text = record.encode()
    peer.sendall(HEAD.pack(len(text), len(slot)) + text)
    peer.sendall(slot)


def receive(peer: socket, open_slot: Callable[[int], Slot]) -> None:
    """Take a file and its record, which is written last, into what `open_slot` gives for so many bytes."""
    length, size = HEAD.unpack(_take(peer, memoryview(bytearray(HEAD.size))))
    text = bytes(_take(peer, memoryview(bytearray(length)))).decode()
    slot = open_slot(size)
    slot.begin()
    _take(peer, memoryview(slot.map))
    slot.commit(text)


def _take(peer: socket, into: memoryview) -> memoryview:
    at = 0
    while at < len(into):
        count = peer.recv_into(into[at:])
        if not count:
            raise StateError("the rank whose copy this one holds has ended.")
        at += count
    return into
