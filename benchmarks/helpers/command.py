"""What the commands of this folder share: which architectures, the progress display, what a result was made with."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import autotp
from autotp.text import processor
from benchmarks.results import ROOT, fresh, git

from .build import Architecture, architectures, model_class
from .isolate import Record

COMMIT = git(ROOT, "rev-parse", "--short=8", "HEAD") or ""  # of the code that was loaded: a run takes hours


def add_choice(parser: argparse.ArgumentParser, limit: float) -> None:
    """The arguments that choose architectures, and the time limit."""
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", help="these model types")
    parser.add_argument("--family", nargs="+", default=[], help="these families")
    parser.add_argument("--limit", type=float, default=limit, help="seconds for one architecture at one degree")
    parser.add_argument(
        "--older", action="store_true", help="those that have no result, or one that is older than its code"
    )
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time (default 1)")


def choose(given: argparse.Namespace, results: Mapping[str, Any], figure: str) -> list[Architecture]:
    """The architectures of the list with one of the names and of one of the families; all where none are given.

    Args:
        given: what `add_choice` asks for. results: by name. figure: theirs in benchmarks/results/depends.toml.
    """
    names, families, listed = set(given.only), set(given.family), architectures()
    unknown = (names - {a.name for a in listed}) | (families - {a.family for a in listed})
    if unknown:
        raise SystemExit(f"not in benchmarks/architectures.toml: {', '.join(sorted(unknown))}")
    known = fresh(results, figure, degrees=getattr(given, "tp", ())) if given.older else set()
    named = [a for a in listed if (not names or a.name in names) and (not families or a.family in families)]
    return [a for a in named if a.name not in known]


def each(
    chosen: Sequence[Architecture],
    measure: Callable[[Architecture], Record],
    keep: Callable[[Architecture, Record], str],
    jobs: int = 1,
) -> None:
    """Measure every architecture that this transformers has, showing how far it is.

    Args:
        chosen: what is measured, in this order. measure: runs in threads, `jobs` at a time.
        keep: takes each record when it is there, with its date and commit, and returns what is shown.
    """
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        chosen = [a for a in chosen if installed(a)]
        task = progress.add_task("", total=len(chosen))
        pool = concurrent.futures.ThreadPoolExecutor(jobs)
        try:
            running = {pool.submit(measure, a): a for a in chosen}
            for done in concurrent.futures.as_completed(running):
                architecture = running[done]
                progress.update(task, description=architecture.name)
                text = keep(architecture, stamped(done.result()))
                console.print(f"{architecture.name:28} {text}", markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)


def stamped(record: Record) -> Record:
    """A record with its date, and the commit whose code it is of; of each degree too, for others may be kept beside."""
    degrees = record.get("tp")  # of a record that is of one degree, a number
    commits = dict.fromkeys(degrees, COMMIT) if isinstance(degrees, Mapping) else {}
    return {**record, "date": datetime.date.today().isoformat(), "commit": COMMIT, "commits": commits}


def beside(old: Record, new: Record) -> dict[str, str]:
    """The commits of degrees, of what is kept of an older record and of a new one."""
    kept = {degree: old.get("commit", "") for degree in old.get("tp", {})}
    return {**kept, **old.get("commits", {}), **new.get("commits", {})}


def installed(architecture: Architecture) -> bool:
    """Whether the installed transformers has it."""
    return model_class(architecture.mapping, architecture.name) is not None


def made(command: str, arguments: Sequence[str] | None) -> dict[str, str]:
    """Versions, machine, date and command: what results are to be read with."""
    return {
        "autotp": autotp.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", command, *(sys.argv[1:] if arguments is None else arguments)]),
    }


def versions(record: Mapping[str, Any]) -> str:
    """What a result was made with, in words; `record` has what `made` gives."""
    return f"torch {record['torch']}, transformers {record['transformers']}, Python {record['python']}"
