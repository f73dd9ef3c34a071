"""A run that outlives its ranks: SIGKILLs in all phases of a step, of workers and of whole agents.

    python -m benchmarks.outlive             # 60 kills
    python -m benchmarks.outlive --kills 8   # fewer
    python -m benchmarks.outlive --write     # and the section of docs/performance.md

Four agents of torchrun with one rank each train one model by a plan of 12 virtual ranks. A killed worker comes back at
the same degree, a killed agent leaves fewer ranks, down to two; then others come. Half of the kills are of ranks that
share one memory; in the other half each agent has memory of its own, which is lost with it (`redundancy=1`). Then two
nodes of two ranks each, with a link between them, lose one (`benchmarks.helpers.nodes`; for an administrator).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers.command import made
from benchmarks.helpers.nodes import DEVICE, Node, joined
from benchmarks.helpers.performance import table, write_section
from benchmarks.outlive import survivor

ROOT = Path(__file__).resolve().parents[2]
HEADING = "A run that outlives its ranks"
AGENTS, LEAST, LIMIT = 4, 2, 300.0  # at first, and before others come; seconds until a start counts as hung
RATE = 25e6  # bytes a second of the link between nodes
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
time.sleep(1e6)
"""
RENDEZVOUS = "is_host=0,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agents:
    """Agents of torchrun: on this machine with one rank each, or on nodes with two.

    Args:
        folder: of what they tell. memory: of the nodes. every, redundancy: of `snapshot()`; with redundancy each agent
            has memory of its own.
        nodes: to start them on, in turn.
    """

    def __init__(self, folder: Path, memory: Path, every: int, redundancy: int, nodes: Sequence[Node] = ()) -> None:
        self.folder, self.memory, self.every, self.redundancy = folder, memory, every, redundancy
        self.nodes, self.count, self.processes = nodes, 0, dict[int, subprocess.Popen[bytes]]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = nodes[0].address if nodes else "127.0.0.1"
        self.store = self.run(0, [sys.executable, "-c", STORE, self.address, str(self.port)], "store")

    def run(self, number: int, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start a command on the node of an agent; what it prints goes to a file."""
        environment = {
            "AUTOTP_MEMORY": str(self.memory_of(number)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": DEVICE if self.nodes else "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        log = self.folder / f"{name}.log"
        if self.nodes:
            return self.nodes[number].start(command, log, environment)
        with open(log, "wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    def memory_of(self, number: int) -> Path:
        """The memory of an agent's node."""
        return self.memory / str(number if self.redundancy else 0)

    def start(self) -> None:
        """Start one more agent."""
        number, self.count = self.count, self.count + 1
        self.memory_of(number).mkdir(parents=True, exist_ok=True)
        agents, ranks = (f"1:{len(self.nodes)}", "2") if self.nodes else (f"{LEAST}:{AGENTS}", "1")
        endpoint = ("--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", self.folder.name)
        command = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", agents, "--nproc-per-node", ranks,
            "--rdzv-backend", "c10d", *endpoint, "--rdzv-conf", RENDEZVOUS,
            "--max-restarts", "1000", "--monitor-interval", "0.2",
            survivor.__file__, str(self.folder), str(self.every), str(self.redundancy),
        )  # fmt: skip
        self.processes[number] = self.run(number, command, f"agent-{number}")

    def lost(self) -> None:
        """Take note of agents that were killed, whose memory goes with them where it is their own."""
        for number, process in [*self.processes.items()]:
            if process.poll() is not None:
                del self.processes[number]
                if self.redundancy:
                    shutil.rmtree(self.memory_of(number))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What ranks have told in a file."""
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        """What `until` returns once that is true."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            if answer := until():
                return answer
            time.sleep(0.02)
        texts = "\n".join(log.read_text()[-2000:] for log in sorted(self.folder.glob("agent-*.log")))
        raise RuntimeError(f"not reached: {what}\n{texts}")

    def started(self, before: int, tp: int) -> list[dict[str, Any]]:
        """What the ranks tell of a start with this many, after so many lines about others."""

        def new() -> list[dict[str, Any]]:
            rows = self.lines("starts")[before:]
            return rows[-tp:] if len(rows) >= tp and all(row["tp"] == tp for row in rows[-tp:]) else []

        return self.wait(new, f"a start of {tp} ranks")

    def steps_lost(self, starts: Sequence[dict[str, Any]]) -> int:
        """Steps that earlier ranks had done and those that have started have not; what the former told is dropped."""
        own, most = {f"done-{row['pid']}" for row in starts}, 0
        for file in self.folder.glob("done-*"):
            if file.name not in own:
                most = max(most, int.from_bytes(file.read_bytes(), "little"))
                file.unlink()
        return max(0, most - starts[0]["first"])

    def finish(self) -> None:
        """Tell the ranks to end, which must give the memory back."""
        (self.folder / "stop").touch()
        self.wait(lambda: all(p.poll() is not None for p in self.processes.values()), "the end")
        status = [p.returncode for p in self.processes.values()]
        left = [*self.memory.rglob("*.data")]
        if any(status) or left:
            raise RuntimeError(f"the agents ended with {status}, and left {left}")

    def end(self) -> None:
        """End what is left."""
        for process in [*self.processes.values(), self.store]:
            for pid in _descendants(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(other for child in children for other in _descendants(child))]


@contextmanager
def agents(every: int, redundancy: int, nodes: Sequence[Node] = ()) -> Iterator[Agents]:
    """Agents, and folders for what they tell and keep."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        group = Agents(Path(folder), Path(memory), every, redundancy, nodes)
        try:
            yield group
        finally:
            group.end()


def killed(group: Agents, kills: int, seed: int) -> list[dict[str, Any]]:
    """A row for each end of ranks: who was killed when, ranks before and after, steps lost, seconds of the start."""
    draw, rows, tp = random.Random(seed), [], AGENTS
    for _ in range(AGENTS):
        group.start()
    group.started(0, tp)
    for number in range(kills):
        if tp == LEAST:
            before, began = len(group.lines("starts")), time.monotonic()
            for _ in range(AGENTS - LEAST):
                group.start()
            rows.append(row(group, group.started(before, AGENTS), began, "", "none: others came", tp))
            tp = AGENTS
        agent, phase = number % 2 == 1, survivor.PHASES[number // 2 % len(survivor.PHASES)]
        before, began = len(group.lines("starts")), time.monotonic()
        order = {"victim": draw.randrange(tp), "phase": phase, "agent": agent}
        (group.folder / "draft").write_text(json.dumps(order))
        (group.folder / "draft").rename(group.folder / "order")
        if agent:
            group.wait(lambda: any(p.poll() is not None for p in group.processes.values()), "the end of an agent")
            group.lost()
        rows.append(row(group, group.started(before, tp - agent), began, phase, "agent" if agent else "worker", tp))
        tp -= agent
    group.finish()
    return rows


def lost_node(every: int) -> tuple[list[dict[str, Any]], int]:
    """Lose one of two nodes, with its memory; a row, and how many losses were told."""
    with joined(RATE) as nodes, agents(every, 1, nodes) as group:
        for _ in nodes:
            group.start()
        group.started(0, 2 * len(nodes))
        group.wait(lambda: len(group.lines("losses")) > 5, "some steps")
        before, began = len(group.lines("starts")), time.monotonic()
        nodes[1].kill()
        group.wait(lambda: group.processes[1].poll() is not None, "the end of an agent")
        group.lost()
        rows = [row(group, group.started(before, 2), began, "any", "node", 4)]
        group.finish()
        return rows, curve(group)


def row(
    group: Agents, starts: Sequence[dict[str, Any]], began: float, phase: str, of: str, before: int
) -> dict[str, Any]:
    """What is known of a start."""
    seconds = {name: round(max(start[name] for start in starts), 2) for name in ("imports", "ready", "stepped")}
    found = {
        "of": of, "phase": phase, "from": before, "to": len(starts), "first": starts[0]["first"],
        "lost": group.steps_lost(starts), "gap": round(time.monotonic() - began, 2), **seconds,
    }  # fmt: skip
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def curve(group: Agents) -> int:
    """How many losses the run has told; refused where one is not, to the bit, that of a run that nothing interrupts.

    Raises:
        RuntimeError: with the step and both losses.
    """
    lines, torch_threads = group.lines("losses"), torch.get_num_threads()
    torch.set_num_threads(1)
    sharded, optimizer = survivor.trained()
    whole = list[str]()
    for number in range(max(line["step"] for line in lines)):
        survivor.step(sharded, optimizer, number, lambda _: None, whole.append)
    torch.set_num_threads(torch_threads)
    for line in lines:
        if line["loss"] != whole[line["step"] - 1]:
            raise RuntimeError(f"step {line['step']}: loss {line['loss']}, uninterrupted {whole[line['step'] - 1]}")
    if {line["step"] for line in lines} != set(range(1, len(whole) + 1)):
        raise RuntimeError("steps are missing between the losses")
    return len(lines)


def everything(kills: int, every: int, seed: int) -> dict[str, Any]:
    """Both halves; refused where more steps are lost than `every`, or a loss is another."""
    found: dict[str, Any] = {"rows": [], "losses": 0}
    for redundancy in (0, 1):
        with agents(every, redundancy) as group:
            rows = killed(group, kills // 2, seed + redundancy)
            found["losses"] += curve(group)
        found["rows"] += [{"redundancy": redundancy, **one} for one in rows]
    rows, losses = lost_node(every)
    found = {"rows": [*found["rows"], *({"redundancy": 1, **one} for one in rows)], "losses": found["losses"] + losses}
    if worst := [one for one in found["rows"] if one["lost"] > every]:
        raise RuntimeError(f"more than {every} steps were lost: {worst}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="half of them with memory that is lost with an agent")
    parser.add_argument("--every", type=int, default=1, help="keep each step of so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    found = everything(given.kills, given.every, given.seed)
    record = {"benchmark": "outlive", **made("benchmarks.outlive", arguments), "cores": os.cpu_count()}
    record |= {"load_before": round(load, 1), "every": given.every, **found}
    print(page(record))
    print(json.dumps(record))
    if given.write:
        write_section(HEADING, page(record))


def page(record: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    rows, cells = record["rows"], []
    for redundancy in (0, 1):
        for of in ("worker", "agent", "none: others came", "node"):
            own = [one for one in rows if (one["redundancy"], one["of"]) == (redundancy, of)]
            if own:
                name = "memory is lost with its agent, redundancy=1" if redundancy else "memory is shared"
                name = "two nodes of two ranks, redundancy=1" if of == "node" else name
                middle = [
                    f"{sorted(one[key] for one in own)[len(own) // 2]:.1f}" for key in ("imports", "stepped", "gap")
                ]
                most = f"{max(one['stepped'] for one in own):.1f}"
                cells.append(
                    [name, of, str(len(own)), str(max(one["lost"] for one in own)), *middle[:2], most, middle[2]]
                )
    head = [
        "",
        "killed",
        "times",
        "steps lost, at most",
        "imports, s",
        "then to a step, s",
        "at most",
        "from kill to step, s",
    ]
    return f"""\
`{record["command"]}`: a Llama of {survivor.SHAPE.layers} layers and {survivor.SHAPE.heads} heads by a plan of
{survivor.VIRTUAL} virtual ranks, AdamW, `every={record["every"]}`, over {AGENTS} to {LEAST} agents of torchrun with
one rank each. Ranks are killed by SIGKILL at random moments of forward, backward, step, and in the middle of a copy.
All {record["losses"]} losses, those of repeated steps too, are to the bit those of one process that nothing interrupts.
Medians; the time from a kill holds torchrun's own waiting for others, and imports. {record["cores"]} cores of
{record["machine"]}; torch {record["torch"]}, Python {record["python"]}, {record["date"]}, load average
{record["load_before"]} before.

{table(head, cells)}"""


if __name__ == "__main__":
    main()
