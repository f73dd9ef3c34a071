"""What `make matrix` runs with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import matrix


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
