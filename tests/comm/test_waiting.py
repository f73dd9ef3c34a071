"""A rank that is waited for: a line that names it and its latest turn; an error only where it is gone."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import channel, lockstep
from autotp.comm.channel import WAIT
from autotp.errors import RankError
from tests.helpers.compare import mesh_of


class Block(nn.Module):
    """An all-reduce, and before it a module that can be hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def pausing(rank: int, world: int, group: Any, pause: float, limit: float) -> tuple[list[str], list[float]]:
    """Lines of a rank while the last one takes long: before its first call, and between calls; and the losses."""
    lines, losses = Lines(), []
    torch.manual_seed(0)
    sharded: Any = autotp.compile(Net(), example_inputs=torch.ones(4, 8), mesh=mesh_of(group))
    logging.getLogger("autotp").addHandler(lines)
    os.environ[WAIT] = str(limit)
    try:
        for place in range(2):
            if place and rank == world - 1:
                time.sleep(pause)
            loss = sharded(torch.ones(4, 8)).square().mean()
            loss.backward()
            losses.append(loss.item())
    finally:
        del os.environ[WAIT]
        logging.getLogger("autotp").removeHandler(lines)
    return lines.lines, losses


def checked(found: list[tuple[list[str], list[float]]], limit: float) -> None:
    (lines, losses), (of_the_late, _) = found[0], found[-1]
    assert not of_the_late and len(set(losses)) == 1, of_the_late
    line, late = re.sub(r" \(\d+\)", "", lines[0]), len(found) - 1  # its place among other modules
    wanted = f"waited {limit:.0f} s at the forward, call 2 of Net, for rank {late}, "
    assert wanted + "whose latest turn was the backward of call 1 of Net" in line, lines


def test_who_is_late_is_logged_and_is_no_error(pool):
    checked(pool.run(pausing, 3.0, 1.0, world=2), 1.0)


def test_a_pause_of_a_minute_is_no_error(pool):
    checked(pool.run(pausing, 60.0, 30.0, world=2), 30.0)


def unconnected(rank: int, world: int, group: Any, ranks: int) -> str:
    """What a rank says at its first turn where so many of them can listen nowhere."""
    listening = channel._listening
    with (
        patch.dict(lockstep._open, clear=True),  # as if the group had no channel yet
        patch.object(channel, "_listening", lambda *given: None if rank < ranks else listening(*given)),
    ):
        try:
            lockstep.meet(lockstep.channel_of(group, rank, world, torch.device("cpu")), "step")
        except RankError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_cannot_connect_refuse_together(pool, ranks):
    for told in pool.run(unconnected, ranks, world=2):
        assert "The 2 ranks cannot connect to each other by TCP" in told
    assert pool.run(unconnected, 0, world=2) == ["", ""]  # the negative control


def test_the_limit_is_read_from_the_environment(monkeypatch):
    for text, seconds in (("5", 5.0), ("0", 0.05), ("soon", 30.0)):
        monkeypatch.setenv(WAIT, text)
        assert channel.wait_limit() == seconds


def test_a_message_longer_than_the_connection_holds_is_sent_whole(monkeypatch):
    one, other = socket.socketpair()
    data, parts = os.urandom(4 << 20), []
    one.setblocking(False)
    reader = threading.Thread(target=lambda: parts.extend(iter(lambda: other.recv(1 << 16), b"")))
    reader.start()
    channel._send(one, data)
    one.close()
    reader.join()
    assert b"".join(parts) == data
    other.close()
    assert channel._ready(one, 60.0)  # closed on this side
    monkeypatch.setattr(channel, "SEND_SECONDS", 0.01)
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other, pytest.raises(TimeoutError, match="takes nothing"):
        channel._send(one, data)
