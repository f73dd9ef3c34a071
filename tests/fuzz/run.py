"""Random modules, verified at tp 2, 3 and 4 on simulated ranks.

    python -m tests.fuzz --count 2000

A failure is shrunk to the smallest module that fails in the same way, and printed as a script of its own. At the end
stand the rules that no module had.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .calls import EVERY
from .check import Failure, InvalidModule, Tally, check
from .modules import Module, drawn
from .shrink import TRIES, script, shrink


@dataclass
class Outcome:
    """Of a run: the tally, and each way to fail with its smallest module and how often it was met."""

    tally: Tally = field(default_factory=Tally)
    failures: dict[str, tuple[Module, Failure]] = field(default_factory=dict)
    met: dict[str, list[int]] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Rules that no module had."""
        return [name for name in EVERY if not self.tally.rules[name]]

    def lines(self) -> Iterable[str]:
        """What is told at the end."""
        t = self.tally
        yield f"{t.modules} modules, {t.proved} plans proved, {sum(t.refused.values())} refused as asked for"
        split = sum(1 for name in EVERY if t.split[name])
        yield f"{len(EVERY) - len(self.missed)} of {len(EVERY)} rules drawn, {split} split"
        if self.missed:
            yield f"never drawn: {', '.join(self.missed)}"
        if whole := [n for n in EVERY if t.rules[n] and not t.split[n]]:
            yield f"never split: {', '.join(whole)}"
        for text, count in (t.invalid + t.refused).most_common(12):
            yield f"{count:6} {text[:160]}"
        for kind, numbers in self.met.items():
            yield f"FAILED {len(numbers)} times, as in number {numbers[0]}: {kind}"


def fuzz(
    numbers: Iterable[int], seed: int = 0, tries: int = TRIES, limit: float = float("inf"),
    told: Callable[[str], None] = print, one: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Draw modules, prove them, and shrink what fails.

    Args:
        numbers: of the modules. seed: of them all. tries: for shrinking one failure.
        limit: seconds, after which no further module is drawn.
        told: is given the script of every new way to fail. one: is called after each module.
    """
    out, began = Outcome(), time.monotonic()
    for number in numbers:
        if time.monotonic() - began > limit:
            break
        module = drawn(seed, number)
        try:
            failure = check(module, out.tally)
        except KeyboardInterrupt:  # what there is by then is told
            break
        except InvalidModule as e:
            out.tally.invalid[f"does not run: {e}"] += 1
            failure = None
        one()
        if failure is None:
            continue
        out.met.setdefault(failure.kind, []).append(number)
        if failure.kind not in out.failures:
            out.failures[failure.kind] = shrink(module, failure, check, tries)
            told(f"# number {number} of seed {seed}\n{script(*out.failures[failure.kind])}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; status 1 where something failed, or a rule was not drawn."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="modules (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="until no more are drawn")
    parser.add_argument("--tries", type=int, default=TRIES, help="modules to try while one failure is made smaller")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, columns = Console(stderr=True), (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(TextColumn("modules"), *columns, console=console) as progress:
        task = progress.add_task("", total=given.count)
        out = fuzz(
            range(given.first, given.first + given.count), given.seed, given.tries, given.minutes * 60,
            lambda text: print(text, flush=True), lambda: progress.advance(task),
        )  # fmt: skip
    for line in out.lines():
        print(line)
    return int(bool(out.failures or out.missed))
