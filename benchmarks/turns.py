"""What it costs that ranks agree before each call: `python -m benchmarks.turns [--write]`.

Two processes of one thread each train the Llama of `benchmarks.step_time` and decode by that of `benchmarks.decode`. A
clock stands around all that a rank does of the turns before a forward and a backward: the digests of the call, the
samples of its inputs, the messages, and the queue of threads. CPU seconds within it, as a part of those of a step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autotp.comm.turn import Turn
from autotp.runtime.calls import Calls, Ticket
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.decode_legs import legs
from benchmarks.helpers.llama.megatron import untouched
from benchmarks.helpers.llama.variants import ours, training_step
from benchmarks.helpers.performance import command, table

from .decode import PROMPT
from .step_time import LENGTH, RANKS, SHAPE

HEADING = "The turn of ranks before a call"
ROUNDS = 60
TRAINED, DECODED = "a training step", "a decoded token"
LIMITS = {TRAINED: 0.005, DECODED: 0.02}  # of the CPU seconds of a step
PARTS = ((Turn, "__enter__"), (Turn, "__exit__"), (Calls, "begin"), (Calls, "end"), (Ticket, "backward"))


class Clock:
    """CPU seconds of this thread within some functions, each moment counted once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.thread_time() - began

        return timed


@contextmanager
def clocked() -> Iterator[Clock]:
    """A clock around the functions of `PARTS`."""
    clock, originals = Clock(), [(kind, name, getattr(kind, name)) for kind, name in PARTS]
    for kind, name, function in originals:
        setattr(kind, name, clock.around(function))
    try:
        yield clock
    finally:
        for kind, name, function in originals:
            setattr(kind, name, function)


def shares(step: Callable[[], Any], rounds: int) -> list[tuple[float, float]]:
    """Of each round: CPU seconds in turns, and of the whole step."""
    for _ in range(2):  # the second call compares nothing that is new
        step()
    out = []
    with clocked() as clock:
        for _ in range(rounds):
            dist.barrier()
            clock.seconds, began = 0.0, time.process_time()
            step()
            out.append((clock.seconds, time.process_time() - began))
    return out


def measured(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """This rank's rounds of each kind of step."""
    model = untouched(SHAPE)
    ids, targets = torch.randint(SHAPE.vocabulary, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    out = {TRAINED: shares(training_step(ours(model, ids, False, SHAPE), ids, targets), rounds)}
    with torch.no_grad():
        prompt = torch.randint(SHAPE.vocabulary, (1, PROMPT + 1), generator=torch.Generator().manual_seed(1))
        out[DECODED] = shares(legs()["autotp, dynamic cache"][1](model.eval(), SHAPE, prompt), rounds)
    return out


def run(rounds: int = ROUNDS) -> dict[str, Record]:
    """By kind of step: medians over the rounds of all ranks, in seconds and as a part of the step."""
    everyone = on_ranks(functools.partial(measured, rounds), RANKS)
    out: dict[str, Record] = {}
    for name in LIMITS:
        pairs = [pair for found in everyone for pair in found[name]]
        out[name] = {
            "turns_s": statistics.median(turns for turns, _ in pairs),
            "step_s": statistics.median(step for _, step in pairs),
            "share": statistics.median(turns / step for turns, step in pairs),
        }
    return out


def page(record: Mapping[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = ["", "in turns, µs", "step, ms", "part", "at most"]
    cells = [
        [name, f"{1e6 * r['turns_s']:.0f}", f"{1e3 * r['step_s']:.1f}", f"{r['share']:.2%}", f"{LIMITS[name]:.1%}"]
        for name, r in record["rows"].items()
    ]
    return f"""\
`{record["command"]}`: CPU of a rank of {RANKS} gloo processes of one thread each, in what ranks do to agree before a
forward and a backward, beside that of the whole step; the Llamas of the sections on step time and on a decoded token.
Medians of {record["rounds"]} rounds on each rank. {record["cores"]} cores of {record["machine"]}; torch
{record["torch"]}, Python {record["python"]}, {record["date"]}, load average {record["load_before"]} before.

{table(head, cells)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command("turns", HEADING, run, page, ROUNDS, __doc__, arguments)


if __name__ == "__main__":
    main()
