"""What `python -m benchmarks.generation` makes of its results."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.generation import line
from benchmarks.helpers.doubled import doubled
from benchmarks.helpers.generation_page import generation

OK: dict[str, Any] = {"ok": True, "why": None}
BAD = {"ok": False, "why": "other tokens | here"}


def test_the_page_counts_what_generates_and_has_a_reason_for_the_rest():
    models = {
        "a": {"family": "f", "tp": {"2": {"dynamic": OK, "static": BAD}}},
        "b": {"family": "f", "tp": {"2": {"dynamic": OK}}},
        "c": {"family": "f", "tp": {"2": {"own": "its class has no generate()"}}},
    }
    page = "\n".join(generation({"models": models}, "Made."))
    assert "| 2 | 2 | 2 of 2 | 0 of 1 |" in page
    assert "| a | 2 | static | other tokens \\| here |" in page and "| c | 2 | its own `generate()` |" in page
    assert list(generation({"models": {}}, "")) == []


def test_a_line_says_what_came_of_it():
    assert line({"dynamic": OK, "static": BAD}) == "dynamic ok  static FAILED other tokens | here"
    assert line({"own": "no"}) == "does not generate: no"


def test_a_forward_that_names_float32_computes_in_float64():
    with doubled():
        assert torch.ones(1, dtype=torch.float16).float().dtype == torch.ones(1).to(torch.float32).dtype == torch.double
    assert torch.ones(1).dtype == torch.float32 != torch.double
