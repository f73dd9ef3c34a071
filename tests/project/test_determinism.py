"""The same model, cluster and version give the same plan, byte for byte, whatever the process hashes by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from autotp.driver.options import Options
from autotp.driver.compile import solve_plan
from tests.helpers.models import captured
for name, tp in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    plan = solve_plan(*captured(name), Options.read(tp), name)
    print("\\x1e", plan.to_json(), "\\x1f", plan)
    print(plan.explain(plan.parameters[-1].name))
"""
CASES = ["llama-tied", "4", "t5", "4"]


def started(seed: int) -> subprocess.Popen[str]:
    """A process of its own that makes plans of several models, as JSON and as text."""
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", SCRIPT, *CASES]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_plans_are_the_same_byte_for_byte():
    both = [started(seed) for seed in (0, 4711)]
    one, other = (process.communicate(timeout=900)[0].split("\x1e")[1:] for process in both)
    assert len(one) == len(other) == len(CASES) // 2
    for name, a, b in zip(CASES[::2], one, other, strict=True):
        different = next(
            (f"{x!r} and {y!r}" for x, y in zip(a.splitlines(), b.splitlines(), strict=False) if x != y), ""
        )
        assert a == b, f"{name}: {different}"


def test_processes_do_hash_differently():
    """The negative control: the order of a set of text differs between these processes."""
    script = "print({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": s}, capture_output=True
        ).stdout
        for s in ("0", "4711")
    }
    assert len(seen) == 2
