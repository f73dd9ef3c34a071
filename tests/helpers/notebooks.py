"""Notebooks of examples/: their cells run in order in one namespace, without a kernel, and what each one prints.

`python -m tests.helpers.notebooks` writes what the cells print into the notebooks.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """A notebook's document."""
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that run, in order."""
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def run(document: dict[str, Any], name: str) -> Iterator[str]:
    """Run the cells in one namespace; what each of them printed.

    Args:
        document: the notebook. name: what a traceback calls it.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    for i, cell in enumerate(code_cells(document)):
        printed = io.StringIO()
        source = compile("".join(cell["source"]), f"{name}, cell {i}", "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(source, names)
        yield printed.getvalue()


def shown(cell: dict[str, Any]) -> str:
    """The text that stands below a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def write(path: Path) -> None:
    """Run a notebook, and write what its cells print below them."""
    document = read(path)
    for number, (cell, text) in enumerate(zip(code_cells(document), run(document, path.name), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [stream] if text else []
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        write(notebook)
