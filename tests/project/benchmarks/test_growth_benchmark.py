"""The exponents and the clock of `benchmarks.growth`."""

from __future__ import annotations

import time
from itertools import count

import pytest
from torch import nn

import autotp
from benchmarks.growth import FAMILIES, LEAST, clocked, exponent, page


def test_an_exponent_is_the_growth_over_a_factor_of_four():
    assert exponent(1.0, 16.0) == pytest.approx(2) and exponent(0.5, 2.0) == pytest.approx(1)
    assert exponent(LEAST / 100, LEAST / 2) is None


def test_each_stage_of_a_plan_is_clocked(monkeypatch):
    ticks, seconds = count(), {}
    model, args = FAMILIES["different blocks"](2)
    with clocked(seconds):
        monkeypatch.setattr(time, "process_time", lambda: next(ticks))
        autotp.plan(model, 2, example_inputs=args)
    assert {"comparison", "problem", "solve", "rewrite", "describe"} == seconds.keys() and min(seconds.values()) > 0


def test_a_family_has_one_thing_so_many_times():
    layers = [sum(1 for m in FAMILIES["depth"](n)[0].modules() if isinstance(m, nn.LayerNorm)) for n in (1, 3)]
    assert layers == [1, 3] and len(FAMILIES["sizes"](3)[1]) == 3 and FAMILIES["loop"](5)[1][0].shape[1] == 5


def test_the_page_says_exponents_where_there_are_some():
    keys = ("command", "ranks", "machine", "torch", "transformers", "python", "date", "load_before")
    rows = {
        "loop": {
            "solve": {"seconds": [0.1, 0.2, 0.4, 3.2], "exponent": 1.5},
            "plan": {"seconds": [0.0] * 4, "exponent": None},
        }
    }
    text = page({"rows": rows, "times": (1, 4, 16, 64)} | dict.fromkeys(keys, "?"))
    assert "| loop | solve | 0.10 | 0.20 | 0.40 | 3.20 | 1.50 |" in text and "| 0.00 |  |" in text
