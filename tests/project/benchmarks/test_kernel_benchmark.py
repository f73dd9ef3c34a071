"""The benchmark of kernels: that both sides compute the same, and what it says; the times need a device."""

from __future__ import annotations

import pytest
import torch

from autotp.passes.optimise.kernels import PATTERNS
from benchmarks.helpers.kernel_work import WORK, Sizes, apart

SMALL = Sizes(16, 32, 24, 40)


@pytest.mark.parametrize("name", WORK)
def test_both_sides_compute_the_same(name):
    work = WORK[name]
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        assert apart(work, work.make(SMALL, dtype, "cpu")) < close


def test_another_function_is_noticed():
    work = WORK["bias_gelu"]
    wrong = type(work)(work.make, work.kernel, lambda x, y: (torch.tanh(x + y),), work.graded, work.elements)
    assert apart(wrong, work.make(SMALL, torch.float32, "cpu")) > 0.1


def test_every_kernel_of_the_table_is_measured():
    measured = {name.partition(",")[0] for name in WORK}
    assert {name for name, _ in PATTERNS} <= measured
