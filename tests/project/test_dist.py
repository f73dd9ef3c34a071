"""`make dist`: the wheel and the sdist hold what they must, and nothing of tests or benchmarks."""

from __future__ import annotations

import zipfile

import pytest

import autotp
from tests import dist


@pytest.mark.ranks
def test_both_are_built_and_a_fault_is_noticed(tmp_path):
    wheel, sdist = dist.build(tmp_path)
    assert wheel.name == f"autotp-{autotp.__version__}-py3-none-any.whl" and dist.faults(wheel, sdist) == []
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/helpers.py", "")
    assert dist.faults(wheel, sdist) == [f"{wheel.name} holds tests/helpers.py"]
