"""`make matrix`: `make quick` on every torch and Python that is supported, where they can be had; and what was run.

One combination after another gets a virtual environment in build/matrix, which is removed after its run (builds of
torch for CUDA are large). What it ran with, when, and how it ended is written into tests/matrix.json, and the table of
docs/matrix.md from it. What cannot be had is said and written nowhere; a combination whose tests fail is status 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = Path(__file__).with_name("matrix.json"), ROOT / "docs/matrix.md"
VERSIONS = "import importlib.metadata as m, json, platform as p; print(json.dumps({'python': p.python_version()} \
| {n: m.version(n) for n in ('torch', 'transformers', 'numpy', 'triton', 'pytest')}))"
HEAD = """# What it was run on

`make matrix` runs `make quick` on each torch and Python that is supported, in an environment of its own with the other
packages as in `constraints.txt`, and writes this table. `make matrix ARGS="--only torch2.12-python3.13"` runs one; one
that is not in the table was not run by us.

What torch 2.11 itself cannot: it captures no `quantile` of a number, knows no derivative of `aminmax`, and multiplies
float8 with scales of rows on a GPU alone. Its attention on a CPU ends the process where a rank has no heads, so that
with it attention is not split over more ranks than there are heads, or sequences. Which pipeline schedules are refused
with it, and with torch 2.12, says [axes](axes.md).

| torch | Python | transformers | numpy | triton | pytest | date | commit | `make quick` |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
TORCHES, PYTHONS = ("2.11", "2.12", "2.13"), ("3.11", "3.12", "3.13")
QUICK = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
CHOSEN = ["-m", "quick"]


def told(command: list[str], log: Path) -> tuple[int, str]:
    """Give the status of a command and the last line that it printed; all of it is appended to the log."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""


def interpreter(version: str) -> str | None:
    """The path of a Python of this version: this one, one on the PATH, or one that pyenv installed."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    return next((path for path in found if path and _version(path) == version), None)


def _version(path: str) -> str:
    """Of an interpreter; "" of one that does not run, such as a shim for versions that are not chosen."""
    asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def pins() -> str:
    """The lines of constraints.txt but for torch's and those of what belongs to one torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    others = ("torch==", "triton==", "setuptools==", "nvidia-", "cuda-")  # torch 2.11 takes no setuptools from 82 on
    return "".join(line for line in lines if not line.startswith(others))


def prepared(python: str, torch: str, folder: Path, log: Path) -> tuple[str, str]:
    """The interpreter of an environment with this torch, and why there is none."""
    own = str(folder / "bin/python")
    (folder / "constraints.txt").write_text(pins(), encoding="utf-8")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--constraint", str(folder / "constraints.txt")]
    # torch first, in any patch version.
    for command in (
        [python, "-m", "venv", str(folder)],
        [*pip, f"torch=={torch}.*", "setuptools>=77"],
        [*pip, "--no-build-isolation", "--editable", ".[dev]", f"torch=={torch}.*"],
    ):
        status, last = told(command, log)
        if status:
            return "", last
    return own, ""


def combination(torch: str, version: str) -> tuple[bool, str]:
    """Return whether one combination is well, or could not be had, and the line that says so."""
    name = f"torch{torch}-python{version}"
    folder, log = ROOT / "build/matrix" / name, ROOT / f"build/matrix/{name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    python = interpreter(version)
    if python is None:
        return True, f"not run: no python{version} here"
    try:
        own, why = prepared(python, torch, folder, log)
        if not own:
            return True, f"not run: cannot be installed ({why[:80]})"
        with_versions = json.loads(told([own, "-c", VERSIONS], log)[1])
        status, last = told([own, *QUICK, *CHOSEN], log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = f"{'green' if status == 0 else 'FAILED'}: {last.strip('= ').split(' in ')[0]}"
    record(name, with_versions | {"date": str(datetime.date.today()), "commit": commit(RESULTS, PAGE), "result": line})
    return status == 0, line


def commit(*written: Path) -> str:
    """The commit that is checked out, with a + where files differ from it, but for those that are `written` now."""
    git = partial(subprocess.run, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    changed = git(
        ["git", "diff", "--quiet", "HEAD", "--", ".", *(f":!{x.relative_to(ROOT)}" for x in written)]
    ).returncode
    return git(["git", "describe", "--always"]).stdout.strip() + "+" * changed


def record(name: str, row: dict[str, str]) -> None:
    """Write a combination's row among the results, and the page from all of them."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = dict(sorted({**rows, name: row}.items()))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: dict[str, dict[str, str]]) -> str:
    """The page that shows the rows."""
    columns = ("torch", "python", "transformers", "numpy", "triton", "pytest", "date", "commit", "result")
    return HEAD + "".join(f"| {' | '.join(row[c] for c in columns)} |\n" for row in rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="combinations whose name has this in it: torch2.12-python3.13")
    only, well = parser.parse_args().only, True
    for torch, version in [(t, v) for t in TORCHES for v in PYTHONS]:
        if only in f"torch{torch}-python{version}":
            good, line = combination(torch, version)
            well &= good
            print(f"torch {torch}  Python {version}  {line}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
