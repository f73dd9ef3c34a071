"""How code reads: what functions of several arguments say of them, and how much stands on one line."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTED = (
    "autotp/ir", "autotp/comm", "autotp/rules", "autotp/plans", "autotp/proof", "autotp/capture", "autotp/driver",
    "cost", "passes",
)  # fmt: skip
LINES, ARGUMENTS = 10, 3  # a function of more lines with so many arguments says what they are
CROWDED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)
# Lines with several comprehensions or conditional expressions, by folder; a folder that is not here has none. These
# numbers only get smaller: who mends lines writes the new number here.
ALLOWED = {
    "autotp": 3, "autotp/capture": 15, "autotp/cli": 9, "autotp/comm": 13, "autotp/driver": 5, "autotp/ir": 10,
    "autotp/kernels": 6, "autotp/plans": 6, "autotp/plans/describe": 6, "autotp/plans/export": 11,
    "autotp/plans/show": 11, "autotp/proof": 13, "autotp/rules": 47, "autotp/runtime": 28,
    "autotp/runtime/checkpoint": 13, "autotp/runtime/compare": 10, "autotp/runtime/interop": 17, "cost": 11,
    "cost/machines": 5, "passes/analysis": 6, "passes/canonicalise": 8, "passes/shard": 12,
}  # fmt: skip


def files(*folders: str) -> list[Path]:
    """The Python files of these folders, each once: the links autotp/passes and autotp/cost are not followed."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if path.resolve() == path]


def undocumented(source: str) -> Iterator[str]:
    """Public functions and methods that have several arguments, are long, and do not say what the arguments are."""
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.Module | ast.ClassDef) or getattr(scope, "name", "").startswith("_"):
            continue
        for function in scope.body:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                continue
            given = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            several = len(set(given) - {"self", "cls"}) >= ARGUMENTS
            long = (function.end_lineno or 0) - function.lineno >= LINES
            if several and long and "Args:" not in (ast.get_docstring(function) or ""):
                yield f"line {function.lineno}: {function.name}"


def crowded(source: str) -> list[int]:
    """Lines on which several comprehensions or conditional expressions begin."""
    lines = Counter(x.lineno for x in ast.walk(ast.parse(source)) if isinstance(x, CROWDED))
    return sorted(line for line, count in lines.items() if count > 1)


def test_functions_of_several_arguments_say_what_these_are():
    faults = [f"{p.relative_to(ROOT)}: {fault}" for p in files(*DOCUMENTED) for fault in undocumented(p.read_text())]
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
    found: Counter[str] = Counter()
    for path in files("autotp", "passes", "cost"):
        found[str(path.parent.relative_to(ROOT))] += len(crowded(path.read_text()))
    more = {folder: n for folder, n in found.items() if n > ALLOWED.get(folder, 0)}
    assert not more, f"more crowded lines than there were: {more}; give each comprehension a line of its own"
    assert crowded("x = [a for a in b if a] if c else []\ny = [\n    a for a in b\n]") == [1]
