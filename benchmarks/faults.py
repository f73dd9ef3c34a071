"""What ranks get when one of them fails or does something else: `python -m benchmarks.faults [--count 200]`.

Two gloo ranks train a small model. One of them is killed, stopped or late, raises, leaves something out, or makes
another call, in a step and at a place that are drawn. Right is: the losses of one device up to where it ends, and an
end, or an `AutoTPError` that names the rank, within 15 seconds of the fault.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.helpers.faulty import KINDS, PAUSES, PLACES, RANKS, STEPS, Fault, expected, work
from benchmarks.helpers.performance import table

COUNT, LIMIT, WITHIN = 200, 5.0, 15.0
CLOSE = 1e-9
RIGHT, NAMED = "right", "named"


@dataclass
class Outcome:
    """What the rank that did nothing wrong got, and how long after the fault."""

    fault: Fault
    happened: bool
    what: str
    seconds: float
    text: str = ""


def drawn(count: int, seed: int) -> list[Fault]:
    """Faults of all kinds in turn."""
    draw = random.Random(seed)
    return [
        Fault(KINDS[i % len(KINDS)], draw.randrange(RANKS), draw.randrange(1, STEPS - 1), draw.choice(PLACES))
        for i in range(count)
    ]


def inject(fault: Fault, limit: float = LIMIT) -> Outcome:
    """Run the ranks with a fault.

    Args:
        limit: time-out of the process group in seconds.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.helpers.warm"])
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(context.Pipe(False) for _ in range(RANKS)), strict=True)
        ranks = [
            context.Process(target=work, args=(rank, fault, folder, limit, theirs[rank]), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for pipe in theirs:
            pipe.close()
        heard = _listen(ours, fault, ranks)
        for rank in ranks:
            rank.join(0.5)
            rank.kill()
            rank.join()
    return judged(fault, expected(fault), heard, ranks[1 - fault.rank].exitcode)


def _listen(pipes: Sequence[Connection], fault: Fault, ranks: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """What the ranks say, until the one that did nothing wrong has ended; wakes the other where it is stopped."""
    heard: dict[tuple[int, str], Any] = {}
    open_, end, wake = dict(zip(pipes, range(RANKS), strict=True)), time.time() + 300.0, math.inf
    while (1 - fault.rank) in open_.values() and time.time() < end:
        for pipe in wait(list(open_), max(0.0, min(end, wake) - time.time())):
            try:
                kind, value, when = pipe.recv()  # type: ignore[union-attr]
                heard[open_[pipe], kind] = value, when  # type: ignore[index]
            except (EOFError, OSError):
                del open_[pipe]  # type: ignore[arg-type]
                continue
            if kind == "fault":
                end = when + WITHIN + 10.0
                wake = when + PAUSES[fault.kind] if fault.kind.startswith("SIGSTOP") else math.inf
        if time.time() >= wake:
            os.kill(ranks[fault.rank].pid, signal.SIGCONT)
            wake = math.inf
    return heard


def judged(fault: Fault, wanted: Sequence[float], heard: dict[tuple[int, str], Any], code: int | None) -> Outcome:
    """What became of a fault, from what the ranks said and how the one that did nothing wrong ended."""
    began = heard.get((fault.rank, "fault"))
    if began is None:
        return Outcome(fault, False, "the fault did not happen", 0.0)
    ended = heard.get((1 - fault.rank, "end"))
    if ended is None:
        return Outcome(fault, True, f"ended by signal {-code}" if code and code < 0 else "hung", math.inf)
    (losses, error, text), when = ended
    seconds = when - began[1]
    if any(abs(a - b) > CLOSE for a, b in zip(losses, wanted, strict=False)):
        what = "wrong losses"
    elif not error and len(losses) == len(wanted):
        what = RIGHT
    elif error == "AutoTPError" and f"rank {fault.rank}" in text and seconds <= WITHIN:
        what = NAMED
    else:
        what = f"{error}, {'late' if seconds > WITHIN else 'names no rank'}"
    return Outcome(fault, True, what, seconds, text)


def rows(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """A row for each kind of fault."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.happened:
            by_kind.setdefault(outcome.fault.kind, []).append(outcome)
    out = []
    for kind, those in by_kind.items():
        bad = [o.what for o in those if o.what not in (RIGHT, NAMED)]
        counts = [str(len(those)), *(str(sum(o.what == what for o in those)) for what in (RIGHT, NAMED)), str(len(bad))]
        out.append([kind, *counts, f"{max(o.seconds for o in those):.1f}", ", ".join(dict.fromkeys(bad)) or "-"])
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help=f"faults (default {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--limit", type=float, default=LIMIT, help="time-out of the process group in seconds")
    parser.add_argument("--only", nargs="+", default=[], choices=KINDS, metavar="KIND", help="faults of these kinds")
    given = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    for fault in drawn(given.count, given.seed):
        if given.only and fault.kind not in given.only:
            continue
        outcomes.append(found := inject(fault, given.limit))
        line = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "place": fault.place}
        bad = found.text[:600] if found.what not in (RIGHT, NAMED) else ""
        print(json.dumps({**line, "what": found.what, "seconds": round(found.seconds, 1), "text": bad}), flush=True)
    print(table(["fault", "happened", "right", "named", "neither", "slowest, s", "what else"], rows(outcomes)))


if __name__ == "__main__":
    main()
