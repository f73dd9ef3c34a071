"""The benchmark of kernels: that both sides compute the same, and what it says; the times need a device."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from autotp.passes.optimise.kernels import PATTERNS
from benchmarks import kernels
from benchmarks.helpers.kernel_work import MODELS, WORK, Sizes

SMALL = Sizes(16, 32, 24, 40)


@pytest.mark.parametrize("name", WORK)
def test_both_sides_compute_the_same(name):
    work = WORK[name]
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        assert kernels.apart(work, work.make(SMALL, dtype, "cpu")) < close


def test_another_function_is_noticed():
    work = WORK["bias_gelu"]
    wrong = type(work)(work.make, work.kernel, lambda x, y: (torch.tanh(x + y),), work.graded, work.elements)
    assert kernels.apart(wrong, work.make(SMALL, torch.float32, "cpu")) > 0.1


def test_every_kernel_of_the_table_is_measured():
    measured = {name.partition(",")[0] for name in WORK}
    assert {name for name, _ in PATTERNS} <= measured


def times(kernel: float, inductor: float) -> dict[str, list[float]]:
    return {"kernel": [kernel, kernel], "eager": [9.0, 9.0], "Inductor": [inductor, inductor]}


def test_only_what_wins_everywhere_is_faster():
    results = {
        "norm, rms": [times(1, 2), times(1, 2)],
        "norm, layer": [times(1, 2), times(2, 1)],
        "class_terms": [times(1, 2), times(1, 1.5)],
    }
    assert kernels.faster(results) == ["class_terms"]


def test_bandwidth_is_of_what_must_be_read_and_written():
    work, sizes = WORK["norm, rms"], MODELS["8B"]
    n = sizes.tokens * sizes.hidden
    cells = kernels.row("x", work, sizes, torch.bfloat16, times(1e-3, 2e-3), 2 * n * 2 / 1e-3)
    assert cells == ["x", "1000", "100%", "9000.00", "2.00", "1000", "250%", "9000.00", "2.00"]


def test_without_a_device_the_page_stays(capsys, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text(f"# Performance\n\n## {kernels.HEADING}\n\na table\n")
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(kernels, "PAGE", page),
        patch.object(kernels, "write_section") as write,
    ):
        kernels.main(["--write"])
        assert "no CUDA device" in capsys.readouterr().out and not write.called
        page.write_text("# Performance\n")
        kernels.main(["--write"])
    assert "run on no device" in write.call_args.args[1]


def test_the_section_has_the_table():
    about = {"command": "python -m benchmarks.kernels", "device": "a GPU", "torch": "2", "triton": "3", "date": "x"}
    text = kernels.section([["norm", *"12345678"]], ["norm"], 3e12, about)
    assert "| norm | 1 | 2 |" in text and "every line: norm." in text and "3.00 TB/s" in text
