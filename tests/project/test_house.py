"""The layer rule, the sizes, the public names, the words, and the wheel: what keeps the house in order."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import autotp
from tests.helpers.house.budgets import budgets, size, sizes
from tests.helpers.house.limits import LIMITS, limits
from tests.helpers.house.slow import NOT_QUICK, ROWS, SAMPLE, SLOW
from tests.helpers.house.sources import ROOT, nodes, sources

ROOMS = {"passes": "autotp.passes", "cost": "autotp.cost"}
# The floors of the house, lowest first: a file imports from its own folder or from folders below it.
FLOORS = (
    "_version", "errors", "compat", "log", "text", "inputs",  # compat is a folder, the others files
    "ir", "comm", "cost", "kernels", "rules", "passes", "plans", "proof", "capture", "runtime", "driver",  # folders
    "integrations", "api", "pretrained", "serving", "cli", "__main__",
)  # fmt: skip
# A Plan, and a Sweep of plans, offer their views as methods, and the views take one: the only circles allowed.
FACADE = ("autotp.plans.plan", "autotp.plans.choices", "autotp.plans.choices")
PRIVATE_TORCH = "autotp.compat"  # the one folder that may touch torch's private modules
MAX_FILE, MAX_FUNCTION = LIMITS["lines of a file"], LIMITS["lines of a function"]
MAX_FILES, MAX_TOP = LIMITS["files in a folder"], LIMITS["files in `autotp/` itself"]
# Each is written in two halves, so that this file does not hold it.
FORBIDDEN = ["/wor" + "k/", "../sha" + "red", "/ro" + "ot/", "pypi" + ".org", "python" + "hosted.org"]


def imports(source: str, package: str) -> Iterator[tuple[int, str, int]]:
    """Line, absolute dotted name and relative level of each imported module or name; `package` holds the file."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}", node.level) for alias in node.names)


def package_of(path: Path) -> str:
    """The dotted package that holds the file, `passes/` being autotp.passes."""
    parts = path.relative_to(ROOT).parts[:-1]
    return ".".join([ROOMS.get(parts[0], parts[0]), *parts[1:]])


def inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


@cache
def packaged() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def floor(name: str) -> int:
    """The floor of a dotted name; `autotp` itself has every public name, and so lies with the last that defines one."""
    part = (name.split(".") + ["api"])[1]
    return FLOORS.index(part) if part in FLOORS else len(FLOORS)


def layer_faults(source: str, module: str) -> list[str]:
    """What the imports of one file, the module of this dotted name, break of the layer rule."""
    faults, package = [], module.rpartition(".")[0]
    for line, name, level in imports(source, package):
        if not inside(name, "autotp"):
            continue
        folder = max((p for p in packaged() if inside(name, p)), key=len)
        if bool(level) != (folder == package):
            faults.append(f"line {line}: {name}: imports are relative inside a folder and absolute across folders")
        same = name.split(".")[1:2] == module.split(".")[1:2]
        named = "autotp._version" if name == "autotp.__version__" else name
        if not same and floor(named) >= floor(module):
            faults.append(f"line {line}: {module} may not import {name}: it lies on a floor above")
    return faults


def module_of(path: Path) -> str:
    return f"{package_of(path)}.{path.stem}"


def circles(graph: Mapping[Any, Iterable[Any]]) -> list[list[str]]:
    """Files that import each other, directly or by way of others; those of a facade with its views aside."""
    found = [sorted(c) for c in nx.strongly_connected_components(nx.DiGraph(graph)) if len(c) > 1]
    return [c for c in found if not set(FACADE) & set(c)]


def import_graph() -> dict[str, set[str]]:
    """Module -> modules that its file imports, those for types alone and those inside functions included."""
    files = sources("autotp", *ROOMS)
    modules = {module_of(p).removesuffix(".__init__") for p in files}
    graph: dict[str, set[str]] = {}
    for path in files:
        name = module_of(path).removesuffix(".__init__")
        for _, target, _ in imports(path.read_text(), package_of(path)):
            home = next((m for m in (target, target.rpartition(".")[0]) if m in modules and m != name), None)
            graph.setdefault(name, set()).update({home} if home else ())
    return graph


def private_torch(source: str) -> list[str]:
    """The private torch modules and names that one file imports, or reaches by attributes."""
    faults = []
    for line, name, _ in imports(source, "file"):
        if inside(name, "torch") and any(part.startswith("_") and part != "__future__" for part in name.split(".")):
            faults.append(f"line {line}: {name}")
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = ast.unparse(node)
            faults += [f"line {node.lineno}: {name}"] * (inside(name, "torch") and name in sys.modules)
    return faults


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_file_imports_from_its_own_floor_or_below():
    files = [p for p in sources("autotp", *ROOMS) if module_of(p) != "autotp.__init__"]
    faults = [f"{names(p)}: {fault}" for p in files for fault in layer_faults(p.read_text(), module_of(p))]
    assert not faults, "\n".join(faults)


def test_no_files_import_each_other():
    assert not circles(import_graph())
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c"]]  # the negative control


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("autotp.cost.prices", "from autotp.passes import base"),
        ("autotp.passes.base", "import autotp.api"),
        ("autotp.passes.base", "import autotp"),
        ("autotp.ir.graph", "from autotp.rules.core import RULES"),
        ("autotp.plans.plan", "from autotp.driver import compile"),
        ("autotp.runtime.tree", "from autotp.runtime.storage import unwrap"),
        ("autotp.passes.base", "from ..layouts import Shard"),
        ("autotp.rules.core", "from autotp.rules.notation import letters"),
        ("autotp.runtime.module", "from autotp.cli import main"),
        ("autotp.errors", "from .compat import sym_size"),
    ],
)
def test_the_layer_rule_notices(module, line):
    assert layer_faults(line, module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("autotp.passes.base", "from autotp.ir.layouts import Shard"),
        ("autotp.passes.shard.planner", "from autotp.passes.analysis.fold import find"),
        ("autotp.passes.base", "from autotp.cost import Cluster"),
        ("autotp.cost.memory", "from . import collective_costs"),
        ("autotp.api", "from autotp.driver.compile import example"),
        ("autotp.inputs", "from .errors import InputError"),
    ],
)
def test_the_layer_rule_allows(module, line):
    assert not layer_faults(line, module)


def test_private_torch_is_imported_in_one_folder():
    files = [p for p in sources("autotp", *ROOMS, "examples") if package_of(p) != PRIVATE_TORCH]
    faults = [f"{names(p)}: {fault}" for p in files for fault in private_torch(p.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("import torch._dynamo", True),
        ("from torch._subclasses import FakeTensorMode", True),
        ("from torch.distributed._functional_collectives import all_reduce", True),
        ("from torch.fx import _pytree", True),
        ("x = torch.utils._pytree.tree_map", True),
        ("from torch.fx import Graph", False),
        ("torch.ops._c10d_functional.all_reduce(x)", False),
        ("import torchvision._internally", False),
    ],
)
def test_private_torch_is_noticed(line, private):
    assert bool(private_torch(line)) is private


def test_files_and_functions_stay_small():
    large = []
    for path in sources("autotp", *ROOMS, "tests", "benchmarks"):
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE:
            large.append(f"{names(path)}: {len(text.splitlines())} lines")
        for node in nodes(text):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                large += [f"{names(path)}:{node.lineno} {node.name}: {length} lines"] * (length > MAX_FUNCTION)
    assert not large, "\n".join(large)


def test_a_folder_is_seen_at_a_glance():
    files = sources("autotp", *ROOMS, "tests", "benchmarks")
    counts = Counter(package_of(p) for p in files if not p.name.startswith("_"))
    assert counts.pop("autotp") <= MAX_TOP
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="nodes are counted as Python 3.11 parses")
def test_folders_hold_their_budgets():
    """Who exceeds one says what goes, in the same change."""
    held, most = sizes(sources("autotp", *ROOMS), ROOT), budgets()
    assert set(held) == set(most)
    assert {folder: count for folder, count in held.items() if count > most[folder]} == {}
    assert size('"""Words."""\nx = (\n    1\n)') == size("x = 1") < size("x = 1 + 1")  # lines and docstrings are free
    assert budgets("| `autotp/ir/` | 1,234 | 99 |") == {"autotp/ir/": 1234}


def test_public_names_are_few_and_documented():
    assert len(autotp.__all__) == len(set(autotp.__all__)) <= LIMITS["public names"]
    objects = {name: getattr(autotp, name) for name in autotp.__all__ if not name.startswith("__")}
    assert not [name for name, value in objects.items() if not (inspect.getdoc(value) or "").strip()]


def test_no_file_names_a_machine_or_a_registry():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files are the project's")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    texts = {names(p): p.read_bytes().decode(errors="ignore") for p in paths if p.is_file() and not p.is_symlink()}
    faults = [f"{path}: {word}" for path, text in texts.items() for word in FORBIDDEN if word in text]
    assert not faults, "\n".join(faults)


def test_every_folder_with_code_is_packaged():
    assert {package_of(p) for p in sources("autotp", *ROOMS)} == set(packaged())


@pytest.mark.ranks
def test_the_wheel_holds_each_file_once_under_autotp(tmp_path):
    for name in ["pyproject.toml", "LICENSE", "README.md"]:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    for folder in ["autotp", *ROOMS]:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dist/*.whl")
    held = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = [f"{package_of(p).replace('.', '/')}/{p.name}" for p in sources("autotp", *ROOMS)]
    folder = "autotp/plans/show/templates"
    templates = [f"{folder}/{p.name}" for p in (ROOT / folder).iterdir()]
    assert templates and sorted(held) == sorted([*wanted, *templates, "autotp/py.typed", "autotp/cli/shapes.json"])


def imported_tests(text: str) -> list[str]:
    """Test files that a source imports."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [f"{n.module if isinstance(n, ast.ImportFrom) else ''}.{alias.name}" for n in nodes for alias in n.names]
    return [name.strip(".") for name in names if any(part.startswith("test_") for part in name.split("."))]


def test_no_test_file_imports_another():
    """What two of them share stands in tests/helpers."""
    found = {str(p): imported_tests(p.read_text()) for p in (ROOT / "tests").rglob("*.py")}
    assert {p: names for p, names in found.items() if names} == {}
    for line in ("from tests.cost.test_cost import ROUND", "from . import test_cost", "import tests.cost.test_cost"):
        assert imported_tests(line)


def test_the_table_of_slow_tests_is_true():
    """Each names a test that there is, once; they are at most one in twenty of all that are collected. So do those that
    `make quick` leaves out, of which none is slow besides."""
    names = [name for _, _, name in ROWS]
    assert len(names) == len(set(names)) <= LIMITS["lines of `tests/slow.txt`"]
    assert NOT_QUICK and not NOT_QUICK & SLOW
    for name in [*names, *NOT_QUICK]:
        path, function = name.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
        assert all((ROOT / document).exists() for document in re.findall(r"docs/[\w-]+\.md", name)), name
    assert 0 < len(SAMPLE) <= LIMITS["of them in `make check`"] and {when for _, when, _ in ROWS} == {"check", "-"}


def test_the_numbers_of_the_contributors_page_are_those_that_are_checked():
    """Its table is what this file reads; the rest of the page has no number of its own, nor has pyproject another."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    prose = [line for line in text.splitlines() if not line.startswith("| ")]
    assert [line for line in prose if re.search(r"(?<![\w.])\d+ |\d\d", line)] == []
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["line-length"] == LIMITS["characters of a line"]
    assert limits("| lines of a file | 351 |\n| what | so |") == {"lines of a file": 351}  # not a number of the test's
