"""How code reads: what functions of several arguments say of them, how much stands on one line, what names say."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.house.limits import LIMITS
from tests.helpers.house.sources import ROOT, nodes, sources

DOCUMENTED = ("autotp", "cost", "passes")
LINES, ARGUMENTS = 10, 3  # a function of more lines with so many arguments says what they are
CROWDED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)

# Participles that do not say what they name: what was found is a match, a node or a layout, what is kept is bytes.
PARTICIPLES = {
    "asked", "brought", "called", "caught", "changed", "chosen", "done", "drawn", "fed", "felt", "found", "given",
    "gone", "got", "heard", "held", "kept", "known", "led", "left", "lent", "made", "met", "missed", "moved", "named",
    "needed", "paid", "passed", "picked", "received", "said", "seen", "sent", "shown", "stood", "taken", "thought",
    "told", "tried", "used", "wanted", "written",
}  # fmt: skip
# Names that users know, and what torch's futures are asked.
KNOWN_TO_USERS = {
    "autotp/plans/estimates.py": ("sent",), "autotp/plans/choices.py": ("sent", "chosen"),
    "autotp/proof/rule.py": ("missed",), "autotp/runtime/checkpoint/saving.py": ("done",),
    "cost/machines/cluster.py": ("known",),
}  # fmt: skip


def undocumented(source: str) -> Iterator[str]:
    """Public functions and methods that have several arguments, are long, and do not say what the arguments are."""
    for scope in nodes(source):
        if not isinstance(scope, ast.Module | ast.ClassDef) or getattr(scope, "name", "").startswith("_"):
            continue
        for function in scope.body:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                continue
            given = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            several = len(set(given) - {"self", "cls"}) >= ARGUMENTS
            long = (function.end_lineno or 0) - function.lineno >= LINES
            command = "typer." in ast.unparse(function.args)  # each has a help
            if several and long and not command and "Args:" not in (ast.get_docstring(function) or ""):
                yield f"line {function.lineno}: {function.name}"


def crowded(source: str) -> list[int]:
    """Lines on which several comprehensions or conditional expressions begin."""
    lines = Counter(x.lineno for x in nodes(source) if isinstance(x, CROWDED))
    return sorted(line for line, count in lines.items() if count > 1)


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """The names that a file gives, each with its line: of values, arguments, attributes, functions and classes. What is
    annotated as a bool is left out: a flag says whether, and a participle says that well."""
    flags = {id(n.target) for n in nodes(source) if isinstance(n, ast.AnnAssign) and _is_bool(n.annotation)}
    for n in nodes(source):
        if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store) and id(n) not in flags:
            yield n.lineno, n.id if isinstance(n, ast.Name) else n.attr
        elif isinstance(n, ast.arg) and not _is_bool(n.annotation):
            yield n.lineno, n.arg
        elif isinstance(n, ast.FunctionDef | ast.ClassDef):
            yield n.lineno, n.name


def _is_bool(annotation: ast.AST | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def participles(source: str) -> list[str]:
    """The names that are a participle of `PARTICIPLES` and nothing else; `left` is none beside `right`."""
    names = [(line, name) for line, name in names_of(source) if not name.isupper()]
    bare = PARTICIPLES - {"left"} if any(name == "right" for _, name in names) else PARTICIPLES
    return [f"line {line}: {name}" for line, name in names if name.strip("_").lower() in bare]


def test_functions_of_several_arguments_say_what_these_are():
    faults = [f"{p.relative_to(ROOT)}: {fault}" for p in sources(*DOCUMENTED) for fault in undocumented(p.read_text())]
    assert not faults, "give these an `Args:` section, with shapes and units:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "arguments", "docstring", "lines", "fault"),
    [
        ("f", "a, b, c", "What.", 12, True),
        ("f", "a, b, c", "What.\n\n    Args:\n        a, b, c: numbers.\n    ", 12, False),
        ("f", "a, b", "What.", 12, False),
        ("f", "a, b, c", "What.", 3, False),
        ("_f", "a, b, c", "What.", 12, False),
    ],
)
def test_a_missing_section_is_noticed(name: str, arguments: str, docstring: str, lines: int, fault: bool):
    body = "    pass\n" * lines
    assert bool(list(undocumented(f'def {name}({arguments}):\n    """{docstring}"""\n{body}'))) is fault


def test_lines_hold_one_comprehension_or_conditional_expression():
    faults = []
    for path in sources("autotp", "passes", "cost"):
        faults += [f"{path.relative_to(ROOT)}: line {line}" for line in crowded(path.read_text())]
    assert not faults, "give each comprehension a line of its own:\n" + "\n".join(faults)
    assert crowded("x = [a for a in b if a] if c else []\ny = [\n    a for a in b\n]") == [1]


def test_names_say_what_they_hold():
    faults = []
    for path in sources("autotp", "passes", "cost"):
        file = str(path.relative_to(ROOT))
        own = [x for x in participles(path.read_text()) if x.rpartition(": ")[2] not in KNOWN_TO_USERS.get(file, ())]
        faults += [f"{file}: {x}" for x in own]
    assert not faults, "name what it is (placements, matches, bytes), not what was done to it:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("found = 1", ["line 1: found"]),
        ("def _told(given): pass", ["line 1: _told", "line 1: given"]),
        ("class C:\n    held: int\n    def f(self): self.kept = 0", ["line 2: held", "line 3: kept"]),
        ("found_nodes = 1\ndef f(made: bool): return [x for x in made]", []),
        ("left, right = 1, 2", []),
        ("left = 1", ["line 1: left"]),
    ],
)
def test_a_participle_is_noticed(source: str, faults: list[str]):
    assert sorted(participles(source)) == sorted(faults)


EASY, FOR_EACH = LIMITS["complexity of a function that explains nothing"], LIMITS["of a harder one, for each comment"]
TOOLS = re.compile(r"# *(type|fmt|noqa|pyright|pragma)\b")  # comments that tell a reader nothing


def explained(source: str) -> set[int]:
    """The lines on which comments begin: one of several lines counts once, what tools are told does not."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and not TOOLS.match(t.string)}
    return {line for line in lines if line - 1 not in lines}


def unexplained(*paths: Path) -> Iterator[str]:
    """Functions with many branches, as ruff counts them (C901: McCabe 1976), and few comments that say why."""
    options = ["--isolated", "--no-cache", "--select=C901", f"--config=lint.mccabe.max-complexity={EASY}"]
    command = [sys.executable, "-m", "ruff", "check", *options, "--output-format=json", *map(str, paths)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode in (0, 1), answer.stderr
    for fault in json.loads(answer.stdout):
        file, line = Path(fault["filename"]), fault["location"]["row"]
        name, complexity = re.findall(r"`(.*)` is too complex \((\d+)", fault["message"])[0]
        source = file.read_text()
        functions = (n for n in nodes(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        end = next(f.end_lineno for f in functions if (f.name, f.lineno) == (name, line))
        comments = explained(source) & set(range(line, (end or line) + 1))
        if len(comments) * FOR_EACH < int(complexity):
            yield f"{file}: line {line}: {name} has complexity {complexity}, and {len(comments)} comments"


def test_hard_functions_say_why_each_step_is_there():
    faults = list(unexplained(*(ROOT / folder for folder in ("autotp", "passes", "cost"))))
    assert not faults, "say before each step why it is there, with what goes wrong without it:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("branches", "comments", "fault"),
    [
        (EASY, [], True),
        (EASY - 1, [], False),
        (EASY, ["# A.", "# B.", "# C."], False),
        (EASY, ["# A.\n    # goes on.", "# B."], True),
        (EASY, ["# type: ignore[a]", "# noqa: B", "# C."], True),
    ],
)
def test_a_hard_function_without_comments_is_noticed(branches: int, comments: list[str], fault: bool, tmp_path: Path):
    lines = [f"    {comments[i] if i < len(comments) else ''}\n    if x == {i}: x += 1\n" for i in range(branches)]
    (tmp_path / "hard.py").write_text("def f(x):\n" + "".join(lines))
    assert bool(list(unexplained(tmp_path))) is fault


FILLER = re.compile(r"(What|Whether|The same|Likewise|Of|Nothing|As|How|Where|Which|Why|That|Those)\b")


def fillers(source: str) -> list[str]:
    """Docstrings that begin with a filler word, where a verb (functions) or a noun (classes, modules) should stand."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told = [ast.get_docstring(node) or "" for node in nodes(source) if isinstance(node, kinds)]
    return [text.partition("\n")[0] for text in told if FILLER.match(text)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = {str(p.relative_to(ROOT)): fillers(p.read_text()) for p in sources(*DOCUMENTED)}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert fillers('"""What it is."""\ndef f():\n    """Return what it is."""') == ["What it is."]
