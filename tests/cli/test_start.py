"""What commands import: help and a saved plan need no torch, `doctor` needs torch and nothing that takes as long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import autotp

HEAVY = {"torch", "sympy", "numpy", "networkx", "highspy", "transformers", "pydantic"}
RUN = """
import json, sys
before = set(sys.modules)
from autotp.cli import app
codes = [app(line.split(), standalone_mode=False) for line in sys.argv[1:]]
print(chr(30) + json.dumps([codes, sorted(set(sys.modules) - before)]))
"""


def loaded(*commands: str, first: str = "", last: str = "") -> tuple[list[int], set[str]]:
    """Exit codes of commands in a process of their own, and the modules that it has then and not after `first`."""
    code = first + RUN + last
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    codes, modules = json.loads(done.stdout.rpartition(chr(30))[2])
    return codes, set(modules)


def test_a_saved_plan_is_shown_without_torch(tmp_path: Path):
    plan = autotp.plan(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), 2, example_inputs=torch.ones(4, 8))
    plan.save(file := tmp_path / "plan.json")
    shown = f"plan {file} --full", f"plan {file} --html {tmp_path}/plan.html", f"plan {file} --json"
    codes, modules = loaded("--help", f"plan {file}", *shown)
    assert codes == [0] * 5 and (tmp_path / "plan.html").exists()
    assert "autotp.plans.plan" in modules and "torch" not in modules


def test_doctor_imports_torch_and_nothing_of_its_size():
    """Beyond `import torch` no part of torch, and of what is built on it only names; each takes seconds. Public names
    are there all the same."""
    codes, modules = loaded("doctor", first="import torch", last="import autotp; assert callable(autotp.Inputs)")
    assert codes == [0] and not {name for name in modules if name.partition(".")[0] in HEAVY}
