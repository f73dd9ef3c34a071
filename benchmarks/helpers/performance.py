"""docs/performance.md: one section for each benchmark, which its command rewrites."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
HEAD = "# Performance\n\nEach section is written by the command that it names, with `--write`.\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_section(title: str, text: str, page: Path = PAGE) -> None:
    """Put the text under the heading `## title` of the page, in the place of what was there, or at the end."""
    before = page.read_text(encoding="utf-8") if page.exists() else HEAD
    section = f"## {title}\n\n{text.strip()}\n"
    parts = re.split(r"^(?=## )", before, flags=re.MULTILINE)
    kept = [part.rstrip() + "\n" for part in parts]
    at = next((i for i, part in enumerate(kept) if part.splitlines()[0] == f"## {title}"), len(kept))
    kept[at : at + 1] = [section]
    page.write_text("\n".join(kept), encoding="utf-8")
