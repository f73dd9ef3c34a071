"""docs/performance.md: one section for each benchmark, which its command rewrites, with a file of what it found."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotp.text import processor
from benchmarks.results import git

from .command import made

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results" / "performance"
LOAD = round(os.getloadavg()[0], 1)  # as the command began
HEAD = (
    "# Performance\n\nEach section and its file of results are written by the command that it names, with `--write`.\n"
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def command(
    name: str, heading: str, run: Callable[[int], Any], page: Callable[[Mapping[str, Any]], str], rounds: int,
    description: str | None, arguments: Sequence[str] | None,
) -> None:  # fmt: skip
    """Measure in rounds, print the section and the record, and with `--write` write the section.

    Args:
        name: of the benchmark's module. heading: of its section. run: gives the rows of so many rounds.
        page: makes the section from a record with them. rounds: by default. description: for `--help`.
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds (default {rounds})")
    options = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    record = {"benchmark": name, **made(f"benchmarks.{name}", arguments), "cores": os.cpu_count()}
    record |= {"rounds": options.rounds, "load_before": round(before, 1), "rows": run(options.rounds)}
    print(page(record))
    print(json.dumps(record))
    if options.write:
        write_section(heading, page(record))


def write_section(title: str, text: str, page: Path = PAGE, made_with: Mapping[str, Any] | None = None) -> None:
    """Put the text under the heading `## title` of the page, in the place of what was there, or at the end.

    The text also goes into a file of benchmarks/results, with what it was made with: figures elsewhere name that file
    (`benchmarks/results/figures.toml`).

    Args:
        title: of the section. text: below its heading. page: which is written.
        made_with: commit, versions and machine of its figures, where these are not of now.
    """
    before = page.read_text(encoding="utf-8") if page.exists() else HEAD
    section = f"## {title}\n\n{text.strip()}\n"
    parts = re.split(r"^(?=## )", before, flags=re.MULTILINE)
    kept = [part.rstrip() + "\n" for part in parts]
    at = next((i for i, part in enumerate(kept) if part.splitlines()[0] == f"## {title}"), len(kept))
    kept[at : at + 1] = [section]
    page.write_text("\n".join(kept), encoding="utf-8")
    if page == PAGE:
        record = {"title": title, **(made_with or made_now()), "text": text.strip().splitlines()}
        result_of(title).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def result_of(title: str) -> Path:
    """The file of results behind the section of this title."""
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.json"


def made_now() -> dict[str, Any]:
    """Commit, versions, machine, date, command, and the load before it ran: what a figure is to be read with."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    command = module.name.removesuffix(".__main__") if module else Path(sys.argv[0]).stem
    commit = git(RESULTS, "rev-parse", "--short=8", "HEAD") or ""
    machine = f"{os.cpu_count()} cores of {processor()}"
    return {"commit": commit, **made(command, None), "machine": machine, "load": LOAD}
