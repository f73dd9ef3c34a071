"""What `python -m benchmarks.lists.generation` makes of its results."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import autotp
from autotp.driver import compile as pipeline
from benchmarks.helpers.build import Architecture
from benchmarks.helpers.lists.captured_once import captured_once
from benchmarks.helpers.lists.forked import forked
from benchmarks.helpers.lists.generated import doubled
from benchmarks.helpers.lists.generation_page import generation
from benchmarks.lists.generation import line, mixed

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
    record = {"tp": {"2": {"dynamic": OK, "static": BAD}}, "cpu_seconds": 3.2}
    assert line(record) == "tp=2 dynamic ok  tp=2 static FAILED other tokens | here  3 CPU s"
    assert line({"own": "no"}) == "does not generate: no"


def test_a_forward_that_names_float32_computes_in_float64():
    with doubled():
        assert torch.ones(1, dtype=torch.float16).float().dtype == torch.ones(1).to(torch.float32).dtype == torch.double
    assert torch.ones(1).dtype == torch.float32 != torch.double


def test_families_take_turns():
    listed = [Architecture(name, family, "") for name, family in (("a", "x"), ("b", "x"), ("c", "y"))]
    assert [a.name for a in mixed(listed)] == ["a", "c", "b"]


def work(number: int, send: Any) -> None:
    send({"found": {"half": number}})
    if number == 2:
        os.kill(os.getpid(), signal.SIGXCPU)
    send({"found": {"more": number}})


def test_a_process_that_dies_leaves_what_it_sent_and_the_others_theirs():
    first, second = forked(work, [(1,), (2,)])
    assert first == ({"found": {"half": 1, "more": 1}}, "")
    assert second == ({"found": {"half": 2}}, "out of CPU time")


def test_a_kind_of_call_is_captured_once_for_two_shardings():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with patch.object(pipeline, "prepare", wraps=pipeline.prepare) as captures, captured_once():
        for _ in range(2):
            sharded = autotp.compile(model, 1, example_inputs=torch.ones(2, 4), check_capture=False)
            for length in (3, 5):
                x = torch.randn(length, length, 4)
                assert torch.equal(sharded(x), model(x))
    assert captures.call_count == 2  # a matrix, and a batch of matrices; without sharing twice as many
