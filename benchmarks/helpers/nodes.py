"""Nodes on one machine: network namespaces of Linux, joined by a link whose rate is limited.

Each node sees its own loopback and one end of the link, and nothing else of the machine's network
(ip-netns(8), veth(4), tc-tbf(8)). Needs the rights of an administrator.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEVICE = "wire"
NAMED = 'hostname "$0" && exec "$@"'  # a name that resolves to the address, with no list of hosts
BURST = 256 * 1024  # bytes that may pass at once: well over one packet, or the rate is not reached


class NoNodesError(RuntimeError):
    """This machine, or this user, cannot make network namespaces; the message says why."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node has sent: over the link to the other node, and to itself."""

    link: int
    inside: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.link - other.link, self.inside - other.inside)


@dataclass(frozen=True)
class Node:
    """A network namespace: its name, and its address on the link, which is the host's name in it too."""

    name: str
    address: str

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run a command on this node, in a session of its own; all that it prints goes to a file."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", NAMED, self.address]
        env = {**os.environ, **environment}
        with log.open("wb") as file:
            return subprocess.Popen(
                [*inside, *command], stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def processes(self) -> list[int]:
        """All that run on this node."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def kill(self) -> None:
        """End every process of this node at once, as a loss of power would."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def sent(self) -> Traffic:
        """What has left its two devices so far, with the headers of packets."""
        text = _run("ip", "netns", "exec", self.name, "cat", "/proc/self/net/dev")
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        counts = {name.strip(): int(row.split()[8]) for name, row in rows.items()}  # the ninth column: bytes sent
        return Traffic(counts[DEVICE], counts["lo"])


@contextmanager
def joined(rate: float) -> Iterator[tuple[Node, Node]]:
    """Two nodes, and a link between them.

    Args:
        rate: of the link, in bytes a second each way.

    Raises:
        NoNodesError: without the tools or the rights.
    """
    nodes = tuple(Node(f"autotp-{os.getpid()}-{i}", f"10.200.0.{i + 1}") for i in range(2))
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        raise NoNodesError(f"{' and '.join(missing)} cannot be found")
    try:
        _join(nodes, rate)
        yield nodes[0], nodes[1]
    except subprocess.CalledProcessError as error:
        raise NoNodesError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def _join(nodes: Sequence[Node], rate: float) -> None:
    for node in nodes:
        _run("ip", "netns", "add", node.name)
    here, there = (node.name for node in nodes)
    _run("ip", "link", "add", DEVICE, "netns", here, "type", "veth", "peer", "name", DEVICE, "netns", there)
    for node in nodes:
        _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _run("ip", "-n", node.name, "link", "set", device, "up")
        limit = ("rate", f"{round(8 * rate)}bit", "burst", str(BURST), "latency", "200ms")
        _run("tc", "-n", node.name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
