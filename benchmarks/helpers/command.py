"""What the commands of this folder share: which architectures, the progress display, what a result was made with."""

from __future__ import annotations

import argparse
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

from .build import Architecture, architectures, model_class


def add_choice(parser: argparse.ArgumentParser, limit: float) -> None:
    """The arguments that choose architectures, and the time limit."""
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", help="these model types")
    parser.add_argument("--family", nargs="+", default=[], help="these families")
    parser.add_argument("--limit", type=float, default=limit, help="seconds for one architecture at one degree")


def choose(given: argparse.Namespace) -> list[Architecture]:
    """The architectures of the list with one of the names and of one of the families; all where none are given."""
    names, families, listed = set(given.only), set(given.family), architectures()
    unknown = (names - {a.name for a in listed}) | (families - {a.family for a in listed})
    if unknown:
        raise SystemExit(f"not in benchmarks/architectures.toml: {', '.join(sorted(unknown))}")
    return [a for a in listed if (not names or a.name in names) and (not families or a.family in families)]


def each(chosen: Sequence[Architecture], one: Callable[[Architecture], str]) -> None:
    """Call `one` for every architecture that this transformers has, showing how far it is; it returns what to show."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for architecture in chosen:
            progress.update(task, description=architecture.name)
            text = one(architecture) if installed(architecture) else "not in this transformers"
            console.print(f"{architecture.name:28} {text}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)


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
