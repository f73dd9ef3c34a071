"""Training over two nodes: where the groups lie, the bytes that leave a node, and a node that is lost.

    python -m benchmarks.two_nodes           # prints the table
    python -m benchmarks.two_nodes --write   # and the section of docs/performance.md

`examples/train.py` on two nodes of two ranks each, started by torchrun with its rendezvous between them. The nodes are
network namespaces of this machine, joined by a link of limited rate (`benchmarks.helpers.nodes`; for an administrator).
Bytes are counted by the kernel, with the headers of packets, in steps between two lines that the script prints.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import autotp
from benchmarks.helpers.command import made
from benchmarks.helpers.nodes import DEVICE, Node, Traffic, joined
from benchmarks.helpers.performance import table, write_section
from examples import train

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
HEADING = "Two nodes, measured"
RATE = 25e6  # bytes a second: well below what one core sends
RANKS, LIMIT = 2, 600.0  # of a node; seconds until a run counts as hung
FIRST, LAST, STEPS = 10, 30, 40  # between the first two bytes are counted
SAVED, KILLED = 10, 20  # a checkpoint is written every so many steps; after these a node is lost
MODEL = ("--width", "128", "--layers", "2", "--length", "64", "--batch", "2", "--accumulate", "1", "--no-recompute")
LAYOUTS = {"tp=2 in a node, dp=2 across": (2, 2), "tp=4 across both": (4, 1)}


class RunError(RuntimeError):
    """A run did not do what it was to; the message ends with what its nodes printed."""


@dataclass
class Run:
    """One start of the script on both nodes."""

    nodes: tuple[Node, Node]
    logs: tuple[Path, Path]
    launchers: Sequence[Any]
    port: int

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        """What `until` returns once that is true. Raises `RunError` where the run ends or hangs before."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            ended = all(launcher.poll() is not None for launcher in self.launchers)
            if answer := until():
                return answer
            if ended:
                break
            time.sleep(0.01)
        raise RunError(f"not reached: {what}\n" + "\n".join(log.read_text()[-3000:] for log in self.logs))

    def reached(self, step: int) -> tuple[Traffic, float]:
        """What node 0 has sent when the script says that this step is done, and the time."""
        self.wait(lambda: re.search(rf"step {step}/", self.logs[0].read_text()), f"step {step}")
        return self.nodes[0].sent(), time.monotonic()

    def finished(self) -> str:
        """The line with the last loss, once all ranks have ended well."""
        status, text = self.ended()
        if status != [0, 0] or (last := re.search(r"(\d+) steps: .* ([\d.]+) at the last", text)) is None:
            raise RunError(f"the launchers ended with {status}\n{text[-3000:]}")
        return last[2]

    def ended(self) -> tuple[list[int], str]:
        """Status of both launchers, once they have ended, and what node 0 printed."""
        self.wait(lambda: all(launcher.poll() is not None for launcher in self.launchers), "the end")
        return [launcher.returncode for launcher in self.launchers], self.logs[0].read_text()


def start(nodes: tuple[Node, Node], folder: Path, port: int, arguments: Sequence[str]) -> Run:
    """Start `examples/train.py` on both nodes.

    Args:
        nodes: of `joined`. folder: for what they print. port: of the rendezvous, on node 0; another one for every run.
        arguments: of the script.
    """
    logs = (folder / f"{port}-0.log", folder / f"{port}-1.log")
    environment = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    launchers = []
    for node, log in zip(nodes, logs, strict=True):
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:{port}", "--rdzv-id", str(port))
        torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(RANKS), *rendezvous)
        command = (sys.executable, *torchrun, str(ROOT / "examples" / "train.py"))
        launchers.append(node.start([*command, *MODEL, *arguments], log, environment))
    return Run(nodes, logs, launchers, port)


def planned(tp: int, dp: int) -> autotp.Plan:
    """The plan that the script runs by."""
    args = train.arguments([*MODEL, "--tp", str(tp), "--dp", str(dp)])
    ids = next(train.Text(args.batch, args.length))
    return autotp.plan(train.model_of(args), tp, dp=dp, example_inputs={"input_ids": ids, "labels": ids})


def expected(plan: autotp.Plan, crossing: bool) -> Traffic:
    """What a node sends in a step by the plan.

    Args:
        crossing: whether tp groups span both nodes. Then ring by ring one rank's bytes leave each node; otherwise those
            of each of its ranks over dp do.
    """
    over_tp = plan.totals.forward_bytes + plan.totals.backward_bytes
    if crossing:
        return Traffic(round(over_tp), round(over_tp * (RANKS - 1)))
    return Traffic(round((plan.batch.sent + plan.batch.values) * RANKS), round(over_tp * RANKS))


def measured(nodes: tuple[Node, Node], folder: Path, port: int, tp: int, dp: int) -> tuple[Traffic, float, str]:
    """What node 0 sends in a step, the seconds of one, and what the run says at its end."""
    run = start(nodes, folder, port, ("--tp", str(tp), "--dp", str(dp), "--steps", str(STEPS)))
    (before, began), (after, ended) = run.reached(FIRST), run.reached(LAST)
    sent, steps = after - before, LAST - FIRST
    return Traffic(sent.link // steps, sent.inside // steps), (ended - began) / steps, run.finished()


def lost(nodes: tuple[Node, Node], folder: Path, port: int, tp: int, dp: int) -> tuple[float, str]:
    """Lose node 1 in the middle of a run, and start both again.

    Args:
        port: this one and the next are used.

    Returns:
        Seconds until node 0 has ended, too; and what the run that goes on from the checkpoint says at its end.
    """
    options = ("--tp", str(tp), "--dp", str(dp), "--steps", str(STEPS), "--save", str(folder / "saved"))
    run = start(nodes, folder, port, (*options, "--save-every", str(SAVED)))
    run.reached(KILLED)
    nodes[1].kill()
    gone = time.monotonic()
    status, text = run.ended()
    seconds = time.monotonic() - gone
    if 0 in status:
        raise RunError(f"a launcher ended with {status}, as if nothing had happened\n{text[-3000:]}")
    return seconds, start(nodes, folder, port + 1, (*options, "--resume", str(folder / "saved"))).finished()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, joined(RATE) as nodes:
        shown = everything(nodes, Path(folder))
    record = made("benchmarks.two_nodes", arguments)
    print(shown)
    if given.write:
        write_section(HEADING, f"{told(record, load)}\n\n{shown}", PAGE)


def everything(nodes: tuple[Node, Node], folder: Path) -> str:
    """The table of bytes, and the sentence about the node that is lost."""
    rows, losses = [], []
    for i, (name, (tp, dp)) in enumerate(track(LAYOUTS.items(), "running", console=Console(stderr=True))):
        found, seconds, loss = measured(nodes, folder, 29400 + i, tp, dp)
        rows.append(row(name, expected(planned(tp, dp), dp == 1), found, seconds))
        losses.append(loss)
    tp, dp = next(iter(LAYOUTS.values()))
    seconds, loss = lost(nodes, folder, 29410, tp, dp)
    head = ("a step of node 0", "over the link, planned", "counted", "inside the node, planned", "counted", "step, ms")
    return (
        f"{table(head, rows)}\nBytes in kB. Node 1 was killed after step {KILLED} of {STEPS}; "
        f"node 0 ended {seconds:.1f} s later. Both were started\nagain from the last "
        f"checkpoint: loss {loss} at the last step, and {losses[0]} in the run that was not stopped.\n"
    )


def told(record: Mapping[str, str], load: float) -> str:
    """What the section was made with."""
    return (
        f"`{record['command']}`: {record['date']}, torch {record['torch']}, gloo, Python {record['python']}, "
        f"{os.cpu_count()} cores of {record['machine']}, load average\n{load:.1f} before the run. "
        f"Two network namespaces with two ranks each, a link of {RATE / 1e6:.0f} MB/s."
    )


def row(name: str, wanted: Traffic, found: Traffic, seconds: float) -> tuple[str, ...]:
    """A row of the table."""
    sizes = (wanted.link, found.link, wanted.inside, found.inside)
    return (name, *(f"{size / 1e3:,.0f}" for size in sizes), f"{1e3 * seconds:.0f}")


if __name__ == "__main__":
    main()
