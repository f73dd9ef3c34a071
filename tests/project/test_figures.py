"""A measured figure of README.md or docs/ stands in a file of results, with what it was made with."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.helpers.command import beside, stamped
from benchmarks.helpers.lists.page import render
from benchmarks.helpers.performance import PAGE, RESULTS, result_of
from benchmarks.results import EXCLUDE, UNKNOWN, fresh, parts_of
from benchmarks.results.__main__ import FAILED, NEVER, main, own_files
from benchmarks.results.__main__ import figures as listed
from tests.conftest import Passed

ROOT = Path(__file__).resolve().parents[2]
FIGURES = tomllib.loads((RESULTS.parent / "figures.toml").read_text(encoding="utf-8"))
UNMEASURED = FIGURES.pop("unmeasured")
GENERATED = {"performance.md", "models.md", "rules.md", "composition.md"}
PAGES = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
BY_HAND = {name: text for name, text in PAGES.items() if Path(name).name not in GENERATED}
MADE_WITH = {"commit", "date", "command", "torch", "python", "machine", "load"}
UNIT = r"\s(?:CPU s|CPU seconds|seconds|times|GB|MB|ms|µs|us|s)(?![\w/])"
FIGURE = re.compile(r"(?<![\w.=/])\d[\d.,]*(?<=\d)" + UNIT)
VERSION = "".join(rf"(?<!{name}\s)" for name in ("torch", "Python", "transformers"))
RATIO = re.compile(VERSION + r"(?<![\w.=/])\d+\.\d{2,}(?![\w.%/])(?!" + UNIT + ")")  # in sentences: with no unit
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
    """Numbers with a unit in the prose of a page, ratios in its sentences, and those in its tables of measurements."""
    sentences = "\n".join(line for line in prose(page).splitlines() if not line.startswith("|"))
    found = [m[0] for m in RATIO.finditer(sentences)]
    found += [" ".join(m[0].split()) for pattern in (FIGURE, SHARE) for m in pattern.finditer(prose(page))]
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
        number = re.sub(UNIT + "$", "", figure)
        assert rounded(cell(source), number), f"{figure} of {page} is {cell(source)} in {source}"


def test_a_figure_that_is_in_no_file_is_refused():
    assert {name: faults for name, page in BY_HAND.items() if (faults := unresolved(page, FIGURES.get(name, {})))} == {}
    assert [x for x in UNMEASURED if not any(x in figures(page) for page in BY_HAND.values())] == []
    page = "It takes 2.5 s, 31%, `7 s`, 12 ms.\n```text\nstep 11.96 ms\n```\n"
    page += "| fact | measured |\n| --- | --- |\n| Few | 1.23 |\n"
    page += "\nIt is 0.97 of torch 2.13's.\n"
    assert unresolved(page, {"31%": ""}) == ["0.97", "2.5 s", "1.23"]
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


def test_what_each_figure_depends_on_is_there():
    """Every file of results has its command and folders; the commands and the folders exist."""
    known = listed(RESULTS.parent)
    assert {f.name for f in known} >= {file.stem for file in RESULTS.glob("*.json")}
    missing = [folder for f in known for folder in f.folders if not (ROOT / folder.removeprefix(EXCLUDE)).exists()]
    assert missing == []
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(f.command.split()[1] in targets for f in known if f.command.startswith("make "))
    assert own_files("python -m benchmarks.silent --write", ROOT) == ["benchmarks/silent"]


DEPENDS = """
[groups]
one = ["one", ":(exclude)one/more"]
two = ["two"]
[figures]
"first" = ["one", "python -m bench --write"]
"second" = ["two", "python -m bench"]
"third" = ["two", "make nothing"]
"""
BENCH = "import sys; print('wrong'); sys.exit(len(sys.argv) - 1)"


@pytest.fixture
def history(tmp_path: Path):
    """A repository with two folders, of which one is changed after both figures were measured; and its `git`."""

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *names, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    files = {
        "one/a.py": "1", "one/more/a.py": "1", "two/a.py": "2", "bench.py": BENCH,
        ".gitignore": "build/\n__pycache__/\n", "benchmarks/results/depends.toml": DEPENDS,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "begin")
    return tmp_path, git


def ages(root: Path) -> dict[str, str]:
    return {f.name: f.age(root) for f in listed(root / "benchmarks" / "results")}


def test_a_figure_older_than_its_folders_is_refused_and_measured_again(history, capsys, monkeypatch):
    root, git = history
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert ages(root) == dict.fromkeys(("first", "second", "third"), NEVER)
    assert main(["--measure"], root) == 1  # the first ends with status 1, and the third is no target of make
    first = ages(root)
    assert first["second"] == "" and first["first"].startswith(f"{FAILED}: status 1: wrong") and first["third"]
    assert main(["--check", "--only", "second"], root) == 0 and main(["--check"], root) == 1
    (root / "bench.py").write_text("print('right')", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "mended")
    assert ages(root)["second"] == "changed since: bench.py"  # its own command's file
    assert main(["--measure", "--only", "first", "second"], root) == 0
    assert [ages(root)[name] for name in ("first", "second")] == ["", ""]
    (root / "one/a.py").write_text("3", encoding="utf-8")
    with pytest.raises(SystemExit, match="commit first: .*\n.*one/a.py"):
        main(["--measure", "--only", "first"], root)
    git("commit", "-q", "-a", "-m", "another")
    assert ages(root) == ages(root) | {"first": "changed since: one", "second": ""}
    assert main(["--measure", "--only", "first"], root) == 0
    (root / "one/more/a.py").write_text("2", encoding="utf-8")  # which it does not depend on
    git("commit", "-q", "-a", "-m", "beside")
    (root / "one/results.json").write_text("{}", encoding="utf-8")  # a command wrote it beside its code
    git("add", ".")
    git("commit", "-q", "-m", "results")
    assert ages(root)["first"] == ""
    made = root / "benchmarks/results/made.json"
    made.write_text(made.read_text().replace(git("rev-parse", "--short=8", "HEAD~3"), "0123abcd"), encoding="utf-8")
    assert ages(root)["second"] == UNKNOWN
    with pytest.raises(SystemExit, match=r"not in depends.toml: fourth"):
        main(["--only", "fourth"], root)


def test_a_list_goes_on_with_what_is_older_than_its_code(history):
    root, git = history
    begin = git("rev-parse", "--short=8", "HEAD")
    (root / "one/a.py").write_text("3", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "another")
    commits = {"old": begin, "new": git("rev-parse", "--short=8", "HEAD"), "elsewhere": "0123abcd"}
    records = {name: {"commit": commit} for name, commit in commits.items()} | {"nobody knows": {}}
    assert fresh(records, "first", root) == {"new"}
    assert fresh(records, "second", root) == {"old", "new"}  # of another folder


def test_parts_of_older_code_are_begun_anew(history, tmp_path):
    root, git = history
    begun, other = (parts_of(tmp_path / name, name, "bench.py", root=root) for name in ("first", "second"))
    assert begun.name == git("rev-parse", "--short=8", "HEAD")
    (root / "one/a.py").write_text("3", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "another")
    again = parts_of(tmp_path / "first", "first", "bench.py", root=root)
    assert again.name == git("rev-parse", "--short=8", "HEAD") and begun.exists()
    assert parts_of(tmp_path / "first", "first", "bench.py", root=root) == again
    assert parts_of(tmp_path / "second", "second", "bench.py", root=root) == other  # of another folder
    (root / "bench.py").write_text("print('right')", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "its own command")
    assert parts_of(tmp_path / "second", "second", "bench.py", root=root) != other


def test_a_degree_is_as_new_as_its_own_commit(history):
    root, git = history
    old = stamped({"tp": {"2": {}, "4": {}}}) | {"commit": git("rev-parse", "--short=8", "HEAD"), "commits": {}}
    (root / "one/a.py").write_text("3", encoding="utf-8")
    git("commit", "-q", "-a", "-m", "another")
    commit = git("rev-parse", "--short=8", "HEAD")
    new = {"tp": {"2": {}}, "commit": commit, "commits": {"2": commit}}
    records = {"a": {"tp": old["tp"] | new["tp"], "commit": commit, "commits": beside(old, new)}}
    assert [fresh(records, "first", root, degrees=degrees) for degrees in ((2,), (2, 4), (8,))] == [{"a"}, set(), set()]
    assert fresh(records, "second", root, degrees=(2, 4)) == {"a"}  # the control: of another folder
    whole = {"b": {"commit": commit}, "c": {"commit": old["commit"]}}  # no degree named: all are of one commit
    assert fresh(whole, "first", root, degrees=(2, 4)) == {"b"}


def test_a_record_of_one_degree_has_one_commit(history):
    record = stamped({"tp": 2, "ok": True})
    assert record["commits"] == {} and record["tp"] == 2
    assert stamped({"tp": {"2": {}}})["commits"] == {"2": record["commit"]}  # the control


def test_slow_tests_go_on_at_the_same_commit(tmp_path):
    file = tmp_path / "slow.json"
    begun = Passed.read(file)
    for name, outcome in (("a", "passed"), ("b", "failed")):
        begun.pytest_runtest_logreport(pytest.TestReport(name, (name, 0, ""), {}, outcome, None, "call"))  # type: ignore[arg-type]
    assert Passed.read(file).tests == {"a"}
    file.write_text(file.read_text().replace(begun.commit, "another"), encoding="utf-8")
    assert Passed.read(file).tests == set()
    # pytest takes a file that is there for a test of its own, before it has read what options our conftest adds
    assert "--go-on=" in (ROOT / "Makefile").read_text()
