"""The record on nodes: what its fields say stands in docs, and nothing is written beside it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
from torch import fx

from autotp.ir import marks
from autotp.ir.marks import NOTHING, Mark, inherit, mark, write

ROOT = Path(__file__).parents[2]
TORCHS = {"val", "nn_module_stack", "stack_trace", "unbacked_bindings"}  # entries of `meta` that torch.export writes


def documented() -> dict[str, str]:
    """The docstring of each field: the string after it."""
    body = next(x for x in ast.parse(inspect.getsource(marks)).body if isinstance(x, ast.ClassDef) and x.name == "Mark")
    rows = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            rows[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return rows


def test_every_field_has_a_docstring_and_docs_have_the_same():
    rows = documented()
    assert list(rows) == [f.name for f in dataclasses.fields(Mark)]
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name, text in rows.items():
        assert f"| `{name}` | {text} |" in page


def foreign(source: str) -> list[str]:
    """Constant keys by which the source reads or writes `meta` of a node, other than torch's own."""
    found = []
    for x in ast.walk(ast.parse(source)):
        if isinstance(x, ast.Subscript):
            owner, key = x.value, x.slice
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.args:
            owner, key = x.func.value, x.args[0]
        else:
            continue
        if isinstance(owner, ast.Attribute) and owner.attr == "meta" and isinstance(key, ast.Constant):
            found += [str(key.value)] if key.value not in TORCHS else []
    return found


def test_nothing_is_written_on_nodes_beside_the_record():
    files = [p for folder in ("autotp", "passes", "cost") for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    assert {str(p): keys for p in files if (keys := foreign(p.read_text()))} == {}


@pytest.mark.parametrize("line", ['n.meta["layout"] = x', 'n.meta.get("dp")', 'n.meta.pop("ranked", 0)'])
def test_what_is_written_beside_it_is_noticed(line):
    assert len(foreign(line)) == 1


def test_write_and_inherit():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert mark(a) is NOTHING
    a.meta["val"] = 1
    write(a, no_grad=True, scope=("x",))
    inherit(b, a, scope=())
    assert b.meta["val"] == 1 and mark(b) == Mark(no_grad=True, scope=())
    assert mark(a).scope == ("x",)
    with pytest.raises(TypeError):
        write(a, unknown=1)
