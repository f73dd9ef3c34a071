"""`make matrix`: `make quick` on every torch and Python that is supported, where they can be had; and what was run.

Each combination gets a virtual environment in build/matrix. What cannot be installed, and why, is a line of the table
at the end; a combination whose tests fail is status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHES, PYTHONS = ("2.11", "2.12", "2.13"), ("3.11", "3.12", "3.13")
QUICK = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
CHOSEN = ["-m", "quick"]


def told(command: list[str], log: Path) -> tuple[int, str]:
    """The status of a command and the last line that it printed; all of it is appended to the log."""
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
    """Whether one combination is well, or could not be had, and the line that says so."""
    folder = ROOT / "build/matrix" / f"torch{torch}-python{version}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    python = interpreter(version)
    if python is None:
        return True, f"not run: no python{version} here"
    own, why = prepared(python, torch, folder, log)
    if not own:
        return True, f"not run: cannot be installed ({why[:80]})"
    status, last = told([own, *QUICK, *CHOSEN], log)
    return status == 0, f"{'ran' if status == 0 else 'FAILED'}: {last.strip('= ')}"


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
