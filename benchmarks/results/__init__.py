"""What was measured, and the command that measures again what is older than the code that it depends on."""

from __future__ import annotations

import functools
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEPENDS = "depends.toml"
WORDS = 300  # characters of a reason
EXCLUDE = ":(exclude)"
UNKNOWN = "of a commit that is not in this history"
# What measuring writes is no code, also where it stands beside some: git leaves these out.
WRITTEN = (
    ":(exclude)benchmarks/results/*.json",
    ":(exclude)docs/assets/equal-bits.svg",
    ":(exclude)docs/assets/mesh-llama-70b.svg",
    ":(exclude)docs/assets/overlap-trace.json",
    ":(exclude)docs/assets/training.svg",
    ":(exclude)docs/composition.md",
    ":(exclude)docs/models.md",
    ":(exclude)docs/performance.md",
    ":(exclude)*/results.json",
)


def git(root: Path, *arguments: str) -> str | None:
    """What git prints in a folder, without its end; None where it ends with another status than 0."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def clean(text: str) -> str:
    """The first words of a message, without the folders of this machine."""
    text = re.sub(r"\S*/site-packages/", "", text.replace(f"{ROOT}/", ""))
    text = " ".join(text.split())
    return text if len(text) <= WORDS else text[:WORDS].rsplit(" ", 1)[0] + " ..."


def changed(root: Path, commit: str, folders: tuple[str, ...]) -> str:
    """Say why what was measured at this commit is older than what it depends on; "" where it is not.

    Args:
        root: of the project. commit: of the figure. folders: that it depends on; of these, what git is told to exclude.
    """
    if git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return UNKNOWN
    besides = [f for f in folders if f.startswith(EXCLUDE)]
    found = [
        f
        for f in folders
        if f not in besides and git(root, "diff", "--quiet", commit, "HEAD", "--", f, *besides, *WRITTEN) is None
    ]
    return f"changed since: {', '.join(found)}" if found else ""


def folders_of(figure: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return the folders that a figure depends on by `depends.toml`, without its own command's."""
    table = tomllib.loads((root / "benchmarks" / "results" / DEPENDS).read_text(encoding="utf-8"))
    return tuple(table["groups"][table["figures"][figure][0]])


def parts_of(folder: Path, figure: str, *own: str, root: Path = ROOT) -> Path:
    """Return the folder of a figure's parts that are of this code, named by the commit at which they began.

    Args:
        folder: of all its parts. figure: in `depends.toml`. own: files or folders of its own command.
            root: of the project.
    """
    depends = (*folders_of(figure, root), *own)
    for place in sorted(folder.glob("*/")):
        if not changed(root, place.name, depends):
            return place
    place = folder / (git(root, "rev-parse", "--short=8", "HEAD") or "no-commit")
    place.mkdir(parents=True, exist_ok=True)
    return place


def fresh(
    records: Mapping[str, Mapping[str, Any]], figure: str, root: Path = ROOT, degrees: Iterable[int] = ()
) -> set[str]:
    """Return the names of a list's records that are as new as the code which `depends.toml` says for its figure.

    Args:
        records: by name, each with its commit, or with one for each degree. figure: in `depends.toml`. root: of the
            project. degrees: that a record is asked for; one that names none is of its commit for all of them.
    """
    folders = folders_of(figure, root)
    old = functools.cache(lambda commit: changed(root, commit, folders))
    wanted = [str(degree) for degree in degrees]

    def new(record: Mapping[str, Any]) -> bool:
        one, each = record.get("commit"), record.get("commits", {})
        commits = [each.get(degree, one if degree in record.get("tp", wanted) else None) for degree in wanted] or [one]
        return all(commit and not old(commit) for commit in commits)

    return {name for name, record in records.items() if new(record)}
