"""What `mkdocs build` does beside its own: links out of docs/ lead to copies of the files, and marks of blocks go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUT = re.compile(r"(\]\()\.\./([^)#\s]+)")  # of docs/: the start of a link, and what it names in the checkout
# Of docstrings: an entry for several names, with its further lines, and errors of which nothing more is said.
NAMES = re.compile(r"^( +)(\w+(?:, \w+)+):( .*(?:\n\1 +.*)*)", re.MULTILINE)
ERRORS = re.compile(r"^( +)(\w+Error(?:, \w+Error)*)\.$", re.MULTILINE)
MARK = re.compile(r"^```python (?:quoted|small)$", re.MULTILINE)  # what tests/project/test_docs.py reads


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to."""
    pages = [f for f in files if f.is_documentation_page()]
    named = {m.group(2) for f in pages for m in OUT.finditer(Path(str(f.abs_src_path)).read_text())}
    for name in sorted(n for n in named if (ROOT / n).is_file()):
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links out of docs/ at those copies, and show marked blocks as Python."""
    return MARK.sub("```python", OUT.sub(r"\1\2", markdown))


class OneNameEach(griffe.Extension):
    """An entry of a docstring may be for several names, and the reader of docstrings knows one each."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = ERRORS.sub(r"\1\2: see [the errors][autotp.errors].", obj.docstring.value)
            obj.docstring.value = NAMES.sub(_apart, text)


def _apart(found: re.Match[str]) -> str:
    indent, names, text = found.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))
