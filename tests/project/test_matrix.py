"""What `make matrix` runs with, and what `make dist` builds."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

import autotp
from tests import dist, matrix


def script(path: Path, line: str) -> str:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_does_not_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script(tmp_path / "shims/python3.99", "exit 127")
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert matrix.interpreter("3.99") is None
    other = script(tmp_path / "versions/3.99.1/bin/python", "echo 3.98")
    assert matrix.interpreter("3.99") is None
    Path(other).write_text("#!/bin/sh\necho 3.99\n")
    assert matrix.interpreter("3.99") == other
    assert matrix.interpreter(f"{sys.version_info.major}.{sys.version_info.minor}") == sys.executable


def test_every_version_but_torchs_is_pinned():
    kept = matrix.pins().splitlines()
    assert any(line.startswith("transformers==") for line in kept)
    assert not [line for line in kept if line.startswith(("torch==", "triton=="))]


def test_the_page_shows_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = json.loads(matrix.RESULTS.read_text(encoding="utf-8"))
    assert matrix.page(rows) == matrix.PAGE.read_text(encoding="utf-8")
    names = [f"torch{t}-python{v}" for t in matrix.TORCHES for v in matrix.PYTHONS]
    assert rows and set(rows) <= set(names)
    for name, row in rows.items():
        assert name.startswith(f"torch{'.'.join(row['torch'].split('.')[:2])}-python")
        assert row["result"].startswith(("green", "FAILED"))
        assert name.endswith(f"-python{'.'.join(row['python'].split('.')[:2])}")
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    row = next(iter(rows.values()))
    for name in ("b", "a", "b"):
        matrix.record(name, row | {"date": "2000-01-01"})
    assert list(json.loads(matrix.RESULTS.read_text())) == ["a", "b"]
    assert matrix.PAGE.read_text().count("2000-01-01") == 2


def test_the_workflow_runs_each_combination_by_the_command():
    workflow = (matrix.ROOT / ".github/workflows/matrix.yml").read_text(encoding="utf-8")
    for versions in (matrix.TORCHES, matrix.PYTHONS):
        assert str(list(versions)).replace("'", '"') in workflow
    assert 'matrix ARGS="--only torch${{ matrix.torch }}-python${{ matrix.python }}"' in workflow
    ci = (matrix.ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in ci


@pytest.mark.ranks
def test_both_are_built_and_a_fault_is_noticed(tmp_path):
    wheel, sdist = dist.build(tmp_path)
    assert wheel.name == f"autotp-{autotp.__version__}-py3-none-any.whl" and dist.faults(wheel, sdist) == []
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/helpers.py", "")
    assert dist.faults(wheel, sdist) == [f"{wheel.name} holds tests/helpers.py"]
