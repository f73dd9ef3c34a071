"""The runner of benchmarks/libraries.toml, and its part of docs/models.md."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from benchmarks.helpers.isolate import merge
from benchmarks.helpers.lists.library import Listed, examine, listed
from benchmarks.helpers.lists.library_page import libraries as section
from benchmarks.lists import libraries

MADE_UP = '''
prelude = "import torch"
shared = ["one==1.0"]
[[library]]
name = "made-up"
packages = ["two==2.0"]
imports = """
class Branching(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if self.weight.sum() > 0 else 1)
"""
[library.models.good]
build = "torch.nn.Sequential(torch.nn.Linear(w, 2 * w), torch.nn.GELU(), torch.nn.Linear(2 * w, w))"
inputs = "(randn(4, w),)"
width = 32
[library.models.bad]
build = "Branching(w, w)"
inputs = "dict(x=randn(4, w))"
width = 32
[library.models.missing]
build = "nowhere.Model(w)"
inputs = "(randn(4, w),)"
'''


def record(model: Listed) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    examine(model, "", parts.append)
    start: dict[str, Any] = {"library": model.library, "recurrent": model.recurrent, "tp": {}}
    return functools.reduce(merge, parts, start)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("list") / "libraries.toml"
    path.write_text(MADE_UP)
    models = listed(path)
    assert models[0].packages == ("one==1.0", "two==2.0") and models[0].width == models[0].proof == 32
    return {model.key: record(model) for model in models}


def test_a_good_model_is_proved_and_a_bad_one_has_its_reason(records):
    good, bad, missing = records.values()
    assert good["export"] is None and good["tp"]["2"]["ok"] and good["weights"] == 2 * 32 * 64 + 96
    assert all(good["tp"][tp]["parameters"] < 1.2 / int(tp) for tp in ("2", "4"))
    assert "data-dependent" in bad["export"] and not bad["tp"]["2"]["ok"] and bad["tp"]["2"]["why"]
    assert missing["failed"].startswith("NameError") and not missing["tp"]


def test_the_page_counts_and_has_a_cause_for_what_falls_short(records):
    results = {"models": records, "listed": 3, "libraries": 1}
    causes = {"made-up/bad": {"cause": "it branches | here", "way_out": "branch outside"}}
    page = "\n".join(section(results, "Made.", causes))
    assert "| taken by export and not recurrent: proved at tp=2 | 1 | 1 | 100.0% |" in page
    assert "| run: built and called | 2 | 3 | 66.7% |" in page
    assert "it branches \\| here | branch outside |" in page and "| not looked into | - |" in page
    assert list(section({"models": {}}, "")) == []
    wide = merge(records["made-up/good"], {"tp": {"2": {"parameters": 0.7, "flops": 0.5, "whole": ["a 2x2"]}}})
    page = "\n".join(section({**results, "models": {"made-up/good": wide}}, "", causes))
    assert "| made-up/good | tp=2: 70.0 parameters, 50.0 flops; whole: a 2x2 |" in page


def test_the_list_is_long_and_pinned():
    models = listed()
    assert len(models) >= 60 and len({m.library for m in models}) >= 25
    packages = {package for model in models for package in model.packages}
    assert all(package.count("==") == 1 for package in packages)
    names = [package.split("==")[0] for package in packages]
    assert len(names) == len(set(names)) and not {"torch", "transformers", "numpy"} & set(names)
    assert all(model.width >= 512 for model in models)


def test_what_is_known_is_not_run_again():
    models = listed()
    assert libraries.choose([], [m.key for m in models[1:]]) == models[:1]
    assert {m.library for m in libraries.choose(["timm"], [])} == {"timm"}
    with pytest.raises(SystemExit, match="nosuch"):
        libraries.choose(["nosuch"], [])
