"""How code reads: what functions of several arguments say of them, and how much stands on one line."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTED = ("autotp", "cost", "passes")
LINES, ARGUMENTS = 10, 3  # a function of more lines with so many arguments says what they are
CROWDED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)
# Folders in which lines still hold several comprehensions or conditional expressions. The list only gets shorter.
NOT_YET = {
    "autotp", "autotp/integrations", "autotp/runtime/generation", "passes/optimise", "autotp/capture", "autotp/cli",
    "autotp/comm", "autotp/driver", "autotp/ir", "autotp/kernels",
    "autotp/plans", "autotp/plans/describe", "autotp/plans/export", "autotp/plans/show", "autotp/proof", "autotp/rules",
    "autotp/runtime", "autotp/runtime/checkpoint", "autotp/runtime/compare", "autotp/runtime/interop", "cost",
    "cost/machines", "passes/analysis", "passes/canonicalise", "passes/shard",
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
            command = "typer." in ast.unparse(function.args)  # each has a help
            if several and long and not command and "Args:" not in (ast.get_docstring(function) or ""):
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
    faults = {folder: n for folder, n in found.items() if n and folder not in NOT_YET}
    assert not faults, f"give each comprehension a line of its own: {faults}"
    assert all(found[folder] for folder in NOT_YET), "a folder that is through leaves the list"
    assert crowded("x = [a for a in b if a] if c else []\ny = [\n    a for a in b\n]") == [1]
