"""docs/cli.md: the commands run, and print what the page shows but for numbers and spaces."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from autotp.cli import app

PAGE = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text(encoding="utf-8")
PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.23.")


def blocks(kind: str) -> list[str]:
    """The page's blocks of code of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def missing(shown: str, printed: str) -> list[str]:
    """Lines that are shown and were not printed in that order."""
    lines = _plain(printed)
    return [
        line for line in _plain(shown) if line not in ("...", "") and line not in lines
    ]  # `in` eats up the iterator


def _plain(text: str) -> Iterator[str]:
    return (re.sub(r"\d+(\.\d+)*(e-\d+)?", "#", " ".join(line.split())) for line in text.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's files lie."""
    path = tmp_path_factory.mktemp("page")
    (path / "llama").mkdir()
    (path / "llama/config.json").write_text(blocks("json")[0])
    (path / "mine.py").write_text(blocks("python")[0])
    return path


def run(command: str) -> Result:
    """`$ autotp ...` in this process."""
    return CliRunner().invoke(app, shlex.split(command)[2:], env={"COLUMNS": "110", "NO_COLOR": "1"})


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: " ".join(block.splitlines()[0].split()[2:5]))
def test_the_page_shows_what_is_printed(block, folder, monkeypatch):
    if "doctor" in block and torch.version.cuda is not None:
        pytest.skip("the page shows a build without accelerators")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    command, _, shown = block.partition("\n")
    done = run(command)
    assert done.exit_code == (1 if '"error"' in shown else 0), done.stderr
    if PINNED:
        assert not missing(shown, done.stdout)


def test_another_output_is_noticed():
    shown = "a 1.5 ms\n...\nb  2"
    assert not missing(shown, "a 7 ms\nx\nb 3\n") and not missing(blocks("console")[0], blocks("console")[0])
    assert missing(shown, "b 3\na 7 ms\n") and missing(shown, "a 7 s\nb 3\n")
    assert len(blocks("console")) >= 8
