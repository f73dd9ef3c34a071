"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.processes.interpreter import Interpreter


@pytest.fixture(scope="package")
def interpreter() -> Iterator[Interpreter]:
    """One process for the files of this folder, which imports torch once."""
    pytest.importorskip("triton")
    process = Interpreter()
    yield process
    process.close()
