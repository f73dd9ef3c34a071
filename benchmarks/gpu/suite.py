"""The tests that need a CUDA device, file by file, by the pytest and the plugins that are at hand."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.helpers.isolate import Record
from benchmarks.helpers.performance import table

from .sizes import Scale

TITLE = "Tests on the device"
ROOT = Path(__file__).resolve().parents[2]
MARK = "@pytest.mark.cuda"
NEEDED = ("pytest", "hypothesis", "transformers", "triton")
# Settings of the project's that name plugins or versions which may not be there, and warnings of other versions.
PLAIN = ("-o", "addopts=", "-o", "minversion=0", "-o", "filterwarnings=", "-p", "no:cacheprovider")


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is run, by name: each file with such tests."""
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in p.read_text()]
    return {name: functools.partial(tests, name) for name in files}


def tests(name: str) -> Record:
    """How many tests of a file passed, failed and were skipped, and the first line of each failure.

    Args:
        name: of the file, from the root of the project.

    Raises:
        RuntimeError: pytest did not come to its end; with what it said, and packages that are missing.
    """
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *PLAIN, "-m", "cuda", f"--junitxml={report}", name]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
        if not report.exists():
            why = f" (not installed: {', '.join(missing)})" if missing else ""
            raise RuntimeError(f"pytest ended with code {run.returncode}{why}: {(run.stderr or run.stdout)[-800:]}")
        return read(report.read_text(encoding="utf-8")) | {"missing": missing}


def read(report: str) -> Record:
    """What pytest's report in XML says."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        fault = next((x for x in case if x.tag in ("failure", "error")), None)
        if fault is not None:
            counts["failed"] += 1
            failures.append(f"{case.get('name')}: {next(iter((fault.get('message') or '').splitlines()), '')}")
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {"counts": counts, "failures": failures}


def section(results: Mapping[str, Record]) -> str:
    """A table of what was found."""
    rows = [[name, *(str(r["counts"][x]) for x in ("passed", "failed", "skipped"))] for name, r in results.items()]
    failures = [failure for r in results.values() for failure in r["failures"]]
    missing = sorted({package for r in results.values() for package in r["missing"]})
    more = "".join(f"\n- {failure}" for failure in failures)
    absent = f"\nNot installed: {', '.join(missing)}.\n" if missing else ""
    return f"{table(['', 'passed', 'failed', 'skipped'], rows)}{absent}{more}"
