"""Which figures are older than the code that they depend on; and measuring these again, on a quiet machine.

    python -m benchmarks.results                  # the list
    python -m benchmarks.results --check          # status 1 where one is older, was never measured so, or failed
    make results                                  # measure what is older; what is done stays done when it is stopped
    make results ARGS="--only serving --minutes 60"

`benchmarks/results/depends.toml` says what each depends on. A figure is of a commit: that of its file of results, or
where that has none the one in `made.json`, which keeps how each command ended here. It is older where a file of its
folders has changed since, whatever the change was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from . import DEPENDS, EXCLUDE, ROOT, WRITTEN, changed, clean, git

MADE, RECORDS = "made.json", "performance"
LOGS = Path("build", "results")
NEVER, FAILED = "never measured by `make results`", "failed"


@dataclass(frozen=True)
class Figure:
    """What is measured together.

    Attributes:
        name: of its file of results, or in `made.json`. command: that measures it. folders: it depends on.
        commit, date: that it is of; "" where nobody knows. failed: the last line of a command that did not end well.
        minutes: that the command took here; None where it did not run yet.
    """

    name: str
    command: str
    folders: tuple[str, ...]
    commit: str = ""
    date: str = ""
    failed: str = ""
    minutes: float | None = None

    def age(self, root: Path) -> str:
        """Say why it is to be measured again: which of its folders have changed, in the order of the table; or ""."""
        if self.failed:
            return f"{FAILED}: {self.failed}"
        return changed(root, self.commit, self.folders) if self.commit else NEVER


def figures(folder: Path) -> list[Figure]:
    """Read the table of a folder of results, and of what each figure is."""
    table = tomllib.loads((folder / DEPENDS).read_text(encoding="utf-8"))
    made = _made(folder)
    out = []
    for name, (group, command) in table["figures"].items():
        record, file = made.get(name, {}), folder / RECORDS / f"{name}.json"
        if file.exists() and not record.get("failed"):
            record = {**record, **_stated(json.loads(file.read_text(encoding="utf-8")))}
        kept = {key: record[key] for key in ("commit", "date", "failed", "minutes") if key in record}
        out.append(Figure(name, command, (*table["groups"][group], *own_files(command, folder.parents[1])), **kept))
    return out


def _made(folder: Path) -> dict[str, Any]:
    file = folder / MADE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _stated(record: Mapping[str, Any]) -> dict[str, str]:
    return {key: record[key] for key in ("commit", "date") if record.get(key, "not noted") != "not noted"}


def own_files(command: str, root: Path) -> list[str]:
    """The file or folder of the module that a command runs."""
    words = shlex.split(command)
    if words[:2] != ["python", "-m"]:
        return []
    place = Path(*words[2].split("."))
    return [str(place if (root / place).is_dir() else place.with_suffix(".py"))]


def measure(figure: Figure, root: Path, folder: Path) -> bool:
    """Run a figure's command, keep how it ended, and return whether that was well; Ctrl-C ends it with this."""
    log = root / LOGS / f"{figure.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = shlex.split(figure.command)
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    record: dict[str, Any] = {
        "commit": git(root, "rev-parse", "--short=8", "HEAD"),
        "load": round(os.getloadavg()[0], 1),
    }
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        status = subprocess.run(words, cwd=root, stdout=out, stderr=subprocess.STDOUT).returncode
    record |= {"date": datetime.date.today().isoformat(), "minutes": round((time.monotonic() - began) / 60, 1)}
    if status:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        record["failed"] = clean(f"status {status}: {lines[-1] if lines else 'nothing printed'}")
    made = _made(folder) | {figure.name: record}
    (folder / MADE).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return not status


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command; 0 where all is well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure what is older")
    parser.add_argument("--check", action="store_true", help="status 1 where a figure is older than what it depends on")
    parser.add_argument("--only", nargs="+", default=[], metavar="FIGURE", help="these, older or not")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after these no further command begins")
    given, folder, console = parser.parse_args(arguments), root / "benchmarks" / "results", Console(stderr=True)
    listed = figures(folder)
    if unknown := set(given.only) - {figure.name for figure in listed}:
        raise SystemExit(f"not in {DEPENDS}: {', '.join(sorted(unknown))}")
    listed = [(f, f.age(root)) for f in listed if not given.only or f.name in given.only]
    old = [figure for figure, why in listed if why or (given.measure and given.only)]
    if not given.measure:
        for figure, why in listed:
            took = "" if figure.minutes is None else f", {figure.minutes:g} min"
            print(
                f"{figure.name}: {figure.commit or 'no commit'}, {figure.date or 'no date'}{took}: {why or 'as it is'}"
            )
        print(f"{len(old)} of {len(listed)} are to be measured again", file=sys.stderr)
        return int(given.check and bool(old))
    folders = dict.fromkeys(x for f in old for x in f.folders if not x.startswith(EXCLUDE))
    if dirty := git(root, "status", "--porcelain", "--", *folders, *WRITTEN):
        raise SystemExit(f"commit first: a figure is of a commit, and these files are of none:\n{dirty}")
    began, bad, done = time.monotonic(), [], set()
    for i, figure in enumerate(old, 1):
        if (time.monotonic() - began) / 60 > given.minutes:
            console.print(f"{len(old) - i + 1} are left for another time")
            break
        if figure.command in done:  # that wrote several
            continue
        console.print(f"{i} of {len(old)}: {figure.command}", markup=False)
        done.add(figure.command)
        if not measure(figure, root, folder):
            bad.append(figure.name)
    if bad:
        console.print(f"failed: {', '.join(bad)}; see {LOGS}", markup=False)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
