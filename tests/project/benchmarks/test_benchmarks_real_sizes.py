"""The runner of benchmarks/real_sizes.toml, and its part of docs/models.md."""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.helpers.isolate import merge
from benchmarks.helpers.lists import real_modules
from benchmarks.helpers.lists.real import DEGREES, Real, compare, examine, export, reals
from benchmarks.helpers.lists.real_page import asked, compared, comparison, ratio, real_sizes, seconds

TABLES = Real("tables", "modules.DLRM((64, 48), width=16)", "(randn(4, 13), ints(40, 2, 4, 3))", dtype="float32")


def record(real: Real) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    examine(real, "", parts.append)
    return functools.reduce(merge, parts, {"load": 1.0})


def test_a_configuration_is_planned_at_every_degree_and_a_failure_has_its_reason():
    good, bad = record(TABLES), record(Real("bad", "nowhere.Model()", "()"))
    assert "nowhere" in bad["failed"] and seconds(bad) == float("inf")
    assert list(good["tp"]) == list(map(str, DEGREES)) and seconds(good) < 60
    assert [good["tp"][tp]["flops"] < 1.3 / int(tp) for tp in ("2", "4")] == [True, True]
    export(TABLES, "", good.update)
    compare(TABLES, "", good.update)
    assert "compared with the model" in good["compared_on"][0] and compared(good) and comparison(good) is not None
    assert comparison(bad) is None and not compared(bad)
    assert not compared(good | {"compared_on": ["the capture was not compared with the model"]})
    assert ratio(good | {"export": 2.0}) == seconds(good) / 2 and ratio(bad) is None and "export_failed" not in good
    assert (asked(good), asked(good | {"repeated": 0.8})) == (2.5, 1.0)
    results = {"listed": 3, "models": {"tables": good, "bad": bad}}
    page = "\n".join(real_sizes(results, "Made up.", {"tables": "too narrow"}))
    assert "1 of 2 take at most\n  60 s" in page and "| bad | - |" in page and "too narrow |" in page
    assert not list(real_sizes({"models": {}}, ""))


def test_the_modules_that_users_write_run_and_the_list_has_twenty():
    torch.manual_seed(0)
    pairs = real_modules.Pairs(blocks=1, width=8, heads=2)
    assert pairs(torch.randn(1, 4, 4, 64)).shape == (1, 4, 4, 8)
    graph, ends = real_modules.GraphGPS(layers=1, width=8, heads=2), torch.randint(5, (2, 3, 6))
    assert graph(torch.randn(3, 5, 8), torch.randn(3, 6, 8), *ends).shape == (3, 5, 8)
    tables = real_modules.DLRM((64, 48), width=16)
    assert tables(torch.randn(4, 13), torch.randint(40, (2, 4, 3))).shape == (4,)
    assert len(reals()) >= 20 and all(real.build and real.inputs for real in reals())
