"""The project's own sources as trees, each parsed once for all that is asked of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def sources(*folders: str) -> list[Path]:
    """The Python files of the folders, each once: the links autotp/passes and autotp/cost are not followed."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if path.resolve() == path]


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, the same one at every call: nobody changes it."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of that tree, as `ast.walk` gives them."""
    return tuple(ast.walk(parsed(source)))
