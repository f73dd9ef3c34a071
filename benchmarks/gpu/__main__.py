"""What is to be measured on a GPU: `make gpu`, or `python -m benchmarks.gpu`.

Parts: 1 the tests that need a device, 2 kernels, 3 a rank's layers, 4 decoding, 5 a compiled training step, 6 FP8
products. Each runs in a process of its own, for less than 8 minutes at a time, and writes what it finds item by item to
a JSON file in build/gpu; the same command goes on where the last one stopped, and a part that has all its results for
this device and these sources is not run again. At the end the section of docs/performance.md is written from the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autotp.cli.facts import versions
from benchmarks.helpers.performance import PAGE, write_section

from .page import HEADING, page, summary
from .parts import PARTS, ROOT, State, about
from .runner import LIMIT, run_all, work

NO_DEVICE = (
    "make gpu: this machine has no CUDA device (torch.cuda.is_available() is False), so nothing was run or written. "
    "Run it on a machine with one; `python -m benchmarks.gpu --device cpu` tries the code at tiny sizes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where all chosen parts are complete without a failure, 1 where not, 2 without a device."""
    given = _read(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    if given.child:
        work(given.child, given.device, given.out, given.limit)
        return 0
    chosen = given.parts.split(",")
    wish = {"limit": given.limit, "budget": given.budget, "again": given.again}
    states = run_all(chosen, given.device, given.out, lambda text: print(text, flush=True), **wish)
    print(summary(states))
    for part, state in states.items():
        for name, why in state.faults.items():
            print(f"part {part}, {name}: {why}")
    print(f"written: {write_results(states, given)}  (to send it: the form 'Measurements on a GPU' among the issues)")
    target = given.page or (PAGE if given.device == "cuda" else None)
    if target is not None and states:
        write_section(HEADING, page(states, about(given.device), datetime.date.today().isoformat()), target)
        print(f"written: {target}")
    fine = all(part in states and states[part].complete and not states[part].faults for part in chosen)
    return 0 if fine else 1


def write_results(states: Mapping[str, State], given: argparse.Namespace) -> Path:
    """Write all that is known of the chosen parts as one file, which may be sent, and give its path."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    about_all = {
        "commit": said.stdout.strip(), "date": datetime.date.today().isoformat(),
        "command": f"make gpu ARGS='--parts {given.parts}'", "device": given.device, "about": about(given.device),
        "versions": versions(),
    }  # fmt: skip
    parts = {part: dataclasses.asdict(state) for part, state in states.items()}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    path.write_text(json.dumps({**about_all, "parts": parts}, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=text)
    parser.add_argument("--parts", default=",".join(PARTS), help="numbers, such as 1,2 (default: all)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of this call")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help=f"seconds for a part's process (default {LIMIT:.0f})"
    )
    parser.add_argument("--again", action="store_true", help="forget what is known of these parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the code")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the files")
    parser.add_argument("--page", type=Path, help="page to write (default: docs/performance.md, on cuda)")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := [part for part in given.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    given.out = given.out.resolve()
    return given


if __name__ == "__main__":
    sys.exit(main())
