"""The Python in README.md and docs/*.md runs: one script per document, some on four ranks.

A block that opens with "```python small" is run with 2 layers where the page says 32. One that opens with "```python
quoted" shows a piece of the source, and must stand there.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autotp
from autotp.rules.core import RULES
from tests.helpers.house.limits import LIMITS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python( small| quoted)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")
DOCUMENTS = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
PEER = "transformers' tp_plan"
PRINTED = ("docs/index.md",)  # beside README.md: what they show as text is what their blocks print,
PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.23.")  # by these versions
# And more blocks than this:
ON_RANKS = {
    "docs/generation.md": 1,
    "docs/integrations.md": 7,
    "docs/guide.md": 10,
    "docs/training.md": 5,
    "docs/axes.md": 5,
    "docs/moving.md": 3,
}


def run_blocks(document: str, alone: int | None = None, **given: Any) -> int:
    """Run a document's blocks one after another, in one namespace, or one `alone`; how many there were."""
    text, names, count = (ROOT / document).read_text(), {"__name__": "document", **given}, 0
    for i, found in enumerate(BLOCK.finditer(text)):
        mark, block = found.group(1), found.group(2)
        if mark == " quoted" or alone not in (None, i):
            continue
        block = block.replace("(32)", "(2)") if mark == " small" else block
        lines = text[: found.start(2)].count("\n")  # so that a traceback shows the document's own line
        exec(compile("\n" * lines + block, str(ROOT / document), "exec", dont_inherit=True), names)
        count += 1
    return count


def on_a_rank(rank: int, world: int, group: Any, document: str, folder: str) -> int:
    own = Path(folder, str(rank))
    own.mkdir()
    back = os.getcwd()
    os.chdir(own)
    try:
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
            return run_blocks(document, folder=f"{folder}/checkpoint")
    finally:
        os.chdir(back)


def test_every_block_is_found():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        assert len(BLOCK.findall(text)) == text.count("```python"), document
        assert text.count("```") % 2 == 0, document


@pytest.mark.parametrize("document", [d for d in DOCUMENTS[1:] if d not in ON_RANKS])
def test_blocks_run(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rules = dict(RULES)
    try:
        run_blocks(document)
    finally:  # a page's own operators are no operators of other tests
        RULES.clear()
        RULES.update(rules)
    printed = capsys.readouterr().out
    if document in PRINTED and PINNED:
        shown = "".join(SHOWN.findall((ROOT / document).read_text()))
        assert shown and not unprinted(shown, printed)


@pytest.mark.parametrize("document", ON_RANKS)
def test_blocks_run_on_ranks(document, tmp_path, pool):
    assert min(pool.run(on_a_rank, document, str(tmp_path))) > ON_RANKS[document]


def unprinted(shown: str, printed: str) -> list[str]:
    """Lines that are shown and not printed, errors such as 1.3e-07 and what `...` stands for aside."""
    lines = {re.sub(r"\d\.\de[-+]\d\d", "_", line).rstrip() for line in printed.splitlines()}
    read = (re.sub(r"\d\.\de[-+]\d\d", "_", line).rstrip() for line in shown.splitlines() if line != "...")
    return [line for line in read if line not in lines]


@pytest.mark.parametrize(("block", "word"), [(0, "equal"), (1, "FITS")])
def test_the_readme_shows_what_its_blocks_print(block, word, capsys):
    text = (ROOT / "README.md").read_text()
    lines = len(text.splitlines())
    assert len(BLOCK.findall(text)) == len(SHOWN.findall(text)) == 2 and lines <= LIMITS["lines of README.md"]
    assert run_blocks("README.md", block, torch=torch, transformers=transformers, autotp=autotp) == 1
    printed, shown = capsys.readouterr().out, SHOWN.findall(text)[block]
    assert len(shown.splitlines()) <= 15
    if PINNED:
        assert not unprinted(shown, printed)
    assert unprinted(shown.replace(word, "another"), printed)


def cells(document: str, heading: str) -> dict[str, list[str]]:
    """The rows of the tables between a heading and the next one, by their first cell."""
    section = (ROOT / document).read_text().split(f"# {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in reversed(rows)}


def test_the_readmes_facts_are_those_of_the_tables():
    """The tables are written by the commands that README.md names."""
    speed = "docs/performance.md"
    _, own, dtensor, theirs = cells(speed, "Bytes of plans against Megatron's")["llama, 12 layers"]
    planning, step = cells(speed, "Planning time"), cells(speed, "Step time beside a hand-written module")
    ratio = {name: f"{float(step[name][1]):.2f}" for name in ("autotp", "DTensor", PEER)}
    facts = (
        ", ".join(cells("docs/models.md", "Architectures")["all"][1:4]),
        f"{own}; DTensor's usual plan and transformers' `tp_plan` {dtensor}",
        ", ".join(planning[name][5] for name in ("Llama-8B", "Llama-70B", "Llama-405B")),
        f"{ratio['autotp']} (wall {float(step['autotp'][3]):.2f}); DTensor {ratio['DTensor']}, `tp_plan` {ratio[PEER]}",
    )
    readme = (ROOT / "README.md").read_text()
    assert dtensor == theirs and [fact for fact in facts if f"| {fact} |" not in readme] == []


def test_a_wrong_block_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "wrong.md").write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    monkeypatch.setattr("tests.project.test_docs.ROOT", tmp_path)
    with pytest.raises(AssertionError) as error:
        run_blocks("wrong.md")
    assert error.traceback[-1].lineno == 5  # counted from 0


def quoted(document: str) -> list[str]:
    """The pieces of source that a document shows."""
    blocks = [m.group(2) for m in BLOCK.finditer((ROOT / document).read_text()) if m.group(1) == " quoted"]
    return [piece.strip("\n") for block in blocks for piece in block.split("\n\n\n")]


def test_quoted_pieces_stand_in_the_source():
    folders = ("autotp", "passes", "cost", "tests", "examples")  # links are not followed
    sources = [p.read_text() for folder in folders for p in (ROOT / folder).rglob("*.py")]
    pieces = [piece for document in DOCUMENTS for piece in quoted(document)]
    assert len(pieces) >= 4
    assert [p for p in pieces if not any(p in text for text in sources)] == []
    assert not any(pieces[0] + " " in text for text in sources)  # what is not there is not found


def test_the_api_page_has_every_public_name():
    shown = re.findall(r"^      heading: autotp\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert {*shown, "AutoTPError", "__version__"} == set(autotp.__all__)  # the errors are shown as a module


def test_every_public_name_has_an_example_that_runs():
    """On the API page, but that of `calibrate`, which measures for seconds: on the page of clusters."""
    runs = {d: "".join(m.group(2) for m in BLOCK.finditer((ROOT / d).read_text())) for d in DOCUMENTS}
    missing = [n for n in autotp.__all__ if n != "__version__" and f"autotp.{n}" not in runs["docs/api.md"]]
    assert missing == ["calibrate"] and any("autotp.calibrate(" in text for text in runs.values())


def test_every_page_is_on_the_site():
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_links_lead_somewhere(document):
    path = ROOT / document
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(prose):
        if "://" not in link:
            target, _, anchor = link.partition("#")
            where = path.parent / target if target else path
            assert where.exists(), link
            assert not anchor or anchor in _anchors(where.read_text()), link
