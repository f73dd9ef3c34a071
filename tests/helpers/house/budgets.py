"""Syntax nodes by folder, without docstrings, and the budgets of CONTRIBUTING.md's second table."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .limits import CONTRIBUTING

ROW = re.compile(r"^\| `([\w/]+/)` \| ([\d,]+) \|", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def budgets(text: str | None = None) -> dict[str, int]:
    """Folder -> at most how many syntax nodes it and the folders in it may have."""
    page = CONTRIBUTING.read_text() if text is None else text
    return {folder: int(number.replace(",", "")) for folder, number in ROW.findall(page)}


def size(source: str) -> int:
    """Syntax nodes of a source: lines that are joined or split change nothing, comments and docstrings are free."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return sum(1 for _ in ast.walk(tree))


def sizes(files: Iterable[Path], root: Path) -> Counter[str]:
    """Syntax nodes by folder (two levels of it in autotp/, one elsewhere), and their sum as `all/`."""
    found: Counter[str] = Counter()
    for path in files:
        parts = path.relative_to(root).parts[:-1]
        folder = "/".join(parts[: 2 if parts[0] == "autotp" else 1]) + "/"
        for name in (folder, "all/"):
            found[name] += size(path.read_text())
    return found
