"""A measured figure of README.md or docs/ stands in a file of results, with what it was made with."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.helpers.lists.page import render
from benchmarks.helpers.performance import PAGE, RESULTS, result_of

ROOT = Path(__file__).resolve().parents[2]
FIGURES = tomllib.loads((RESULTS.parent / "figures.toml").read_text(encoding="utf-8"))
UNMEASURED = FIGURES.pop("unmeasured")
GENERATED = {"performance.md", "models.md", "rules.md", "composition.md"}
PAGES = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
BY_HAND = {name: text for name, text in PAGES.items() if Path(name).name not in GENERATED}
MADE_WITH = {"commit", "date", "command", "torch", "python", "machine", "load"}
FIGURE = re.compile(r"(?<![\w.=/])\d[\d.,]*(?<=\d)\s(?:CPU s|CPU seconds|seconds|times|GB|ms|µs|us|s)(?![\w/])")
SHARE = re.compile(r"(?<![\w.])\d[\d.]*%")
FACT = re.compile(r"\d+ of \d+|\d+\.\d+")
# A table whose column is `measured`, or that stands under the command of a benchmark.
TABLE = re.compile(
    r"(?:^\| fact \| measured \|.*\n|`python -m benchmarks[^\n]*\n\n\|.*\n)\|[-:| ]+\n((?:\|.*\n)+)", re.MULTILINE
)


def prose(page: str) -> str:
    """The page without its blocks, which other tests run or compare, without code, and without lists of devices."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if "TFLOP/s" not in line)


def figures(page: str) -> list[str]:
    """Numbers with a unit in the prose of a page, and those in its tables of what was measured."""
    found = [" ".join(m[0].split()) for pattern in (FIGURE, SHARE) for m in pattern.finditer(prose(page))]
    for rows in TABLE.findall(page):
        cells = [cell for row in rows.splitlines() for cell in row.split(" | ")[1:]]
        found += [figure for cell in cells for figure in FACT.findall(re.sub(r"`[^`]*`", "", cell))]
    return found


def shown(page: str) -> str:
    """The blocks of a page."""
    return "\n".join(re.findall(r"```.*?```", page, re.DOTALL))


def unresolved(page: str, measured: dict[str, str]) -> list[str]:
    """Figures of a page that are in no file of results, nor said to be none."""
    return [x for x in figures(page) if x not in measured and x not in UNMEASURED and not in_block(x, page)]


def in_block(figure: str, page: str) -> bool:
    """Whether a block of the same page prints the figure, perhaps with more digits: a prediction that runs there."""
    number, _, unit = figure.partition(" ") if " " in figure else (figure.rstrip("%"), "", "%")
    printed = re.findall(rf"(\d+(?:\.\d+)?) ?{re.escape(unit)}", shown(page))
    return any(rounded(value, number) for value in printed)


def rounded(value: str, shown: str) -> bool:
    """Whether a value, rounded to as many digits, is what is shown."""
    digits = len(shown.partition(".")[2])
    return value == shown or f"{float(value):.{digits}f}" == shown


def cell(source: str) -> str:
    """The cell that an entry of the table of figures names."""
    name, _, place = source.partition(": ")
    row, column = place.split(" / ")
    text = render() if name == "models" else "\n".join(json.loads((RESULTS / f"{name}.json").read_text())["text"])
    head: list[str] = []
    for line in text.splitlines():
        cells = [x.strip() for x in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and not head:
            counts: Counter[str] = Counter()
            for x in cells:
                counts[x] += 1
                head.append(x if counts[x] == 1 else f"{x} {counts[x]}")
        elif cells and cells[0] == row and column in head:
            return cells[head.index(column)]
        head = head if cells else []
    raise LookupError(source)


@pytest.mark.parametrize("page", sorted(FIGURES))
def test_a_measured_figure_is_that_of_its_file(page):
    for figure, source in FIGURES[page].items():
        assert figure in figures(BY_HAND[page]), f"{page} has no {figure}"
        assert rounded(cell(source), figure), f"{figure} of {page} is {cell(source)} in {source}"


def test_a_figure_that_is_in_no_file_is_refused():
    assert {name: faults for name, page in BY_HAND.items() if (faults := unresolved(page, FIGURES.get(name, {})))} == {}
    assert [x for x in UNMEASURED if not any(x in figures(page) for page in BY_HAND.values())] == []
    page = "It takes 2.5 s, 31%, `7 s`, 12 ms.\n```text\nstep 11.96 ms\n```\n"
    page += "| fact | measured |\n| --- | --- |\n| Few | 1.23 |\n"
    assert unresolved(page, {"31%": ""}) == ["2.5 s", "1.23"]
    assert rounded("1.036", "1.04") and not rounded("1.036", "1.03")
    with pytest.raises(LookupError):
        cell("planning-time: Llama-9B / module to plan")


def test_sections_are_those_of_their_files():
    page, titles = (
        PAGE.read_text(encoding="utf-8"),
        re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE),
    )
    for title in titles:
        record = json.loads(result_of(title).read_text(encoding="utf-8"))
        assert record["title"] == title and record.keys() >= MADE_WITH, title
        text = page.split(f"## {title}\n", 1)[1].split("\n## ")[0].strip()
        assert text == "\n".join(record["text"]), f"{title}: written by hand? {record['command']}"
    assert {result_of(title) for title in titles} == set(RESULTS.glob("*.json"))
