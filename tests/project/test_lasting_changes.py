"""Changes of torch that last for the process stand in one table of at most five rows, and nowhere else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autotp
from autotp import compat

ROOT = Path(autotp.__file__).parent
MAX_ROWS = 5


def changes(source: str) -> Iterator[str]:
    """Assignments to attributes of what a file imports from torch, and registrations of hooks on everything."""
    tree = ast.parse(source)
    torchs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torchs |= {(a.asname or a.name).partition(".")[0] for a in node.names if a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            torchs |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            targets = [node.args[0]] if name == "setattr" and node.args else []
            if name.startswith(("register_optimizer_step", "register_module_")) and "buffer" not in name:
                yield name
        for target in targets:
            while isinstance(target, ast.Attribute):
                target = target.value
                if isinstance(target, ast.Name) and target.id in torchs:
                    yield ast.unparse(node)


def test_they_are_made_in_one_file():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path != ROOT / "compat" / "patches.py" and (own := [*changes(path.read_text())]):
            found[str(path.relative_to(ROOT))] = own
    assert not found, found
    assert [*changes("from torch.distributed.tensor import DTensor\nDTensor.data = 1")] == ["DTensor.data = 1"]


def test_the_table_has_few_rows_of_what_there_is():
    assert len(compat.LASTING) <= MAX_ROWS
    for place, reason in compat.LASTING.items():
        function, _, why = reason.partition(": ")
        assert callable(getattr(compat, function)) and len(why) > 20
        module = max((name for name in sys.modules if f"{place}.".startswith(f"{name}.")), key=len)
        value: Any = sys.modules[module]
        for name in place[len(module) + 1 :].split("."):
            value = getattr(value, name)
