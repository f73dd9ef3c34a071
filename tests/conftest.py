"""What every test shares: one thread, a fixed seed, the golden files, and one pool of workers for the whole run."""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# MKL picks kernels by the machine, and on some the last bit then depends on where operands lie in memory. Tests that
# compare bit by bit need one kernel (Intel: "Conditional Numerical Reproducibility"). Set before torch loads MKL.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch

from tests.helpers.pool import Pool

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="run the golden tests alone and rewrite tests/golden")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--update-golden"):
        others = [item for item in items if "golden" not in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text equals tests/golden/name.txt, or becomes it under --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if kept != text:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"golden/{name}.txt", "now", lineterm="")
            pytest.fail("\n".join([*lines, "If the change is meant: make golden, and read the diff."]), pytrace=False)

    return check


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The worker processes, started by the first test that wants them and kept for the whole run."""
    workers = Pool()
    yield workers
    workers.close()
