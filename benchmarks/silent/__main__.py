"""What becomes of a call where one rank parts from the others: `make silent`, or `python -m benchmarks.silent`.

Ways into a sharded module by ways to part, at tp=2, and a share of them at dp x tp, cp x tp and pp x tp. It goes on
where it stopped; a cell that is neither right nor one error on all ranks is printed, and makes the command fail, unless
it is known (`KNOWN` in `judge.py`); so does a known one that has come right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers.command import made
from benchmarks.helpers.performance import write_section
from tests.helpers.processes.pool import Pool
from tests.helpers.sharing.capture_files import FOLDER
from tests.helpers.sharing.shared_captures import shared_captures

from .cells import MESHES, Cell, cells
from .judge import Outcome, known
from .page import HEADING, page
from .table import LIMIT, Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "silent.json", ROOT / "docs" / "performance.md"
SHOWN = 1500  # characters of a fault


def tried(todo: Sequence[Cell], folder: Path, limit: float, times: int, keep: Any) -> list[str]:
    """Try cells of one mesh; `keep` is given each outcome.

    Args:
        folder: for what is saved. limit: of the group's time-out, in seconds. times: of each, until one is a fault.

    Returns: the faults that are not known, and what is known and has come right.
    """
    bad = []
    with ExitStack() as stack:
        pool = Pool()
        stack.callback(pool.close)
        stack.enter_context(shared_captures())
        table = Table(pool, folder)
        for number, cell in enumerate(todo, 1):
            outcome = table.tried(cell, limit=limit)
            for _ in range(1, times):  # threads come in another order each time
                outcome = table.tried(cell, limit=limit) if outcome.fine else outcome
            keep(outcome)
            line = f"{number}/{len(todo)} {cell}: {outcome.what}, {outcome.seconds:.1f} s, {outcome.cpu:.1f} s of CPU"
            if outcome.fine == bool(known(cell)):
                bad.append(f"{line}\n  {outcome.text[-SHOWN:] or 'known, and has come right: take it off the list'}")
                line = bad[-1]
            print(line, flush=True)
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where all is right, or known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silent", description=__doc__)
    parser.add_argument("--mesh", nargs="+", default=["tp", "dp", "cp", "pp"], help="axes beside tp; tp for none")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="ways in, ways to part, or WAY_IN/WAY_TO_PART"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--limit", type=float, default=LIMIT, help="time-out of the process group in seconds")
    parser.add_argument("--times", type=int, default=1, help="try each so often: what happens seldom is seen then")
    parser.add_argument("--anew", action="store_true", help="try again what has a result")
    parser.add_argument("--write", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"seed": given.seed, "results": {}}
    )
    if record["seed"] != given.seed:
        record = {"seed": given.seed, "results": {}}
    record |= made("benchmarks.silent", []) | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}

    def keep(outcome: Outcome) -> None:
        result = {"what": outcome.what, "seconds": round(outcome.seconds, 1), "cpu": round(outcome.cpu, 1)}
        record["results"].setdefault(str(outcome.cell.mesh), {})[outcome.cell.name] = result
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")

    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder  # of captures; processes that are forked later have it from the first one
        for mesh in (mesh for mesh in MESHES if mesh.axis in given.mesh):
            found = record["results"].get(str(mesh), {})
            todo = [cell for cell in cells(mesh, given.seed, given.only) if given.anew or cell.name not in found]
            bad += tried(todo, Path(folder), given.limit, given.times, keep)
    print(page(record))
    print(*bad, sep="\n")
    if given.write:
        write_section(HEADING, page(record), PAGE)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
