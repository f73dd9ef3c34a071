"""Files of plans: one that was changed is refused, and nothing that a file holds runs for long or fails unsaid."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp import Plan
from autotp.errors import PlanError
from autotp.plans.saved import sealed


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> Plan:
    return autotp.plan(model, 2, example_inputs=torch.randn(4, 8))


def leaves(data: Any) -> list[tuple[Any, Any]]:
    """Every list or mapping of the data with each of its keys that holds neither."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for key, value in pairs:
        found += leaves(value) if isinstance(value, dict | list) and value else [(data, key)]
    return found


def test_every_change_of_a_file_is_refused(plan):
    draw, text = random.Random(0), plan.to_json()
    for _ in range(60):
        data = json.loads(text)
        at, key = draw.choice([x for x in leaves(data) if x[1] not in ("seal", "format")])
        at[key] = ["I"] if at[key] == [] else {"I": "R", "R": "P", 0: 1, 1: 0}.get(at[key], "I")
        with pytest.raises(PlanError, match=r"changed after it was saved.*plan again"):
            Plan.from_json(json.dumps(data))
    data = json.loads(text)
    del data["seal"]
    with pytest.raises(PlanError, match="changed after"):
        Plan.from_json(json.dumps(data))
    assert Plan.from_json(json.dumps(json.loads(text))) == plan  # another way to write the same


def resized(text: str) -> dict[str, Any]:
    return {"decisions": {"x": [[], [], 0, {"repeat": text, "segments": [[8, 1]]}]}}


HOSTILE = {
    "power": resized("9**9**9**9"),
    "power of a symbol": resized("s0**99999999"),
    "product": resized("9000000000*9000000000*9000000000"),
    "division": resized("1//0"),
    "long": resized("s0+" * 1000 + "s0"),
    "nested": resized("(" * 400 + "s0" + ")" * 400),
    "a flag": {"tp": True},
    "ranks": {"tp": 10**18},
    "no ranks": {"tp": 0},
    "a great number": {"tp": 10**30},
    "text": {"tp": "2"},
    "dp": {"batch": {"size": 10**9}},
    "name": {"model": 5},
    "notes": {"notes": 5},
    "totals": {"totals": {"flops": "many"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_hostile_file_holds_is_refused_at_once(plan, name):
    text, start = sealed(json.loads(plan.to_json()) | HOSTILE[name]), time.process_time()
    with pytest.raises(PlanError, match=r"[Pp]lan again|Plan\.save"):
        Plan.from_json(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"format": ' + b"[" * 80 + b"]" * 80 + b"}", "nested more than 64 deep"),
        (b"\xff\xfe{}", "is not text in UTF-8"),
        (b'{"format": 1' + b"0" * 5000 + b"}", "is not JSON"),
    ],
)
def test_text_that_is_no_plan(content, said, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=said) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(200_000_000)
    for path, said in (
        (tmp_path / "none.json", "cannot be read: No such file"), (tmp_path, "is a folder: give a regular file"),
        (tmp_path / "pipe.json", "is a pipe or device"), (Path("/dev/zero"), "is a pipe or device"),
        (tmp_path / "large.json", "has 190.7 MiB, and at most 95.4 MiB are read"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=said) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: {},
        lambda d: dict(list(d.items())[1:]),
        lambda d: d | {"more": next(iter(d.values()))},
        lambda d: {name: replace(x, ins=()) for name, x in d.items()},
        lambda d: {name: replace(x, outs=(*x.outs, *x.outs)) for name, x in d.items()},
    ],
)
def test_decisions_that_are_not_the_graphs(model, plan, wrong):
    """Of a plan that was made by hand, or sealed again."""
    other = replace(plan, decisions=wrong(dict(plan.decisions)), origin=None)
    with pytest.raises(PlanError, match=r"decisions.*Plan again"):
        autotp.parallelize(model, other, example_inputs=torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"Plan again"):
        autotp.parallelize(model, replace(plan, parameters=(), origin=None), example_inputs=torch.randn(4, 8))
