"""Files of plans: one that was changed is refused, and nothing that a file holds runs for long or fails unsaid."""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autotp
from autotp import Plan
from autotp.driver.compile import capture_model
from autotp.errors import PlanError
from autotp.inputs import normalise
from autotp.passes.shard.planner import Builder
from autotp.plans.saved import fold, sealed, unfold
from tests.helpers.plans import planned_for


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
        at[key] = ["I"] if at[key] in ([], {}) else {"I": "R", "R": "P", 0: 1, 1: 0}.get(at[key], "I")
        with pytest.raises(PlanError, match=r"changed after it was saved.*plan again"):
            Plan.from_json(json.dumps(data))
    data = json.loads(text)
    del data["seal"]
    with pytest.raises(PlanError, match="changed after"):
        Plan.from_json(json.dumps(data))
    assert Plan.from_json(json.dumps(json.loads(text))) == plan  # another way to write the same


def resized(text: str) -> dict[str, Any]:
    return {"decisions": fold([["x", [], [], 0, {"repeat": text, "segments": [[8, 1]]}]])}


def recurring(**changes: Any) -> dict[str, Any]:
    """Two blocks that are alike but for a number, with a change of how that is written."""
    (entry,) = fold([["s", 1], ["s", 2]])
    return {"states": [entry | changes]}


AXIS = {"size": 2, "fully_shard": False, "sent": 0.0, "seconds": 0.0, "backward": 0.0, "values": 0.0}


def over(*axes: Any) -> dict[str, Any]:
    return {"axes": list(axes)}


HOSTILE = {
    "power": resized("9**9**9**9"),
    "power of a symbol": resized("s0**99999999"),
    "product": resized("9000000000*9000000000*9000000000"),
    "division": resized("1//0"),
    "long": resized("s0+" * 1000 + "s0"),
    "nested": resized("(" * 400 + "s0" + ")" * 400),
    "a flag": over(["tp", {"size": True}]),
    "ranks": over(["tp", {"size": 10**18}]),
    "no ranks": over(["tp", {"size": 0}]),
    "a great number": over(["tp", {"size": 10**30}]),
    "text": over(["tp", {"size": "2"}]),
    "dp": over(["dp", AXIS | {"size": 10**9}], ["tp", {"size": 2}]),
    "no axis": over(),
    "an axis without a size": over(["tp", {}]),
    "an axis that is none": over("tp"),
    "name": {"model": 5},
    "notes": {"notes": 5},
    "totals": {"totals": {"flops": "many"}},
    "many records": recurring(at=[[0, 1, 10**12]]),
    "many in all": {"states": [{"like": ["s" * 1000, "I"], "at": [[0, 1, 1 << 20]]}]},
    "fewer than none": recurring(at=[[0, 1, -2]]),
    "a place twice": recurring(at=[0, 0]),
    "a place too far": recurring(at=[0, 7]),
    "great numbers": recurring(numbers=[[[1, 10**18, 100]]]),
    "too few numbers": recurring(numbers=[[1]]),
    "no numbers": recurring(like=["#", "#"]),
    "numbers that nothing takes": recurring(like=["s", "I"]),
    "no pattern": {"states": [{"at": [0]}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_hostile_file_holds_is_refused_at_once(plan, name):
    text, start = sealed(json.loads(plan.to_json()) | HOSTILE[name]), time.process_time()
    with pytest.raises(PlanError, match=r"[Pp]lan again|Plan\.save"):
        Plan.from_json(text)
    assert time.process_time() - start < 5


def test_what_later_formats_say_of_an_axis_is_refused_by_its_name(plan):
    data = json.loads(plan.to_json())
    (tp,) = data["axes"]
    inner = [*tp[:1], {**tp[1], "virtual": 4}]
    for axes, said in (
        ([inner], "the axes tp with virtual of tp"),
        ([["ep", {"size": 2, "shares": [1, 3], "layouts": {}}], tp], "layouts of ep and shares of ep"),
        ([["pp", AXIS], ["dp", AXIS], tp], "for the axes pp, dp, tp"),
    ):
        with pytest.raises(PlanError, match=f"{said}.*plan again"):
            Plan.from_json(sealed({**data, "axes": axes}))


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
    other = replace(plan, decisions=wrong(dict(plan.decisions)), builder=None)
    with pytest.raises(PlanError, match=r"decisions.*Plan again"):
        autotp.parallelize(model, other, example_inputs=torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"Plan again"):
        autotp.parallelize(model, replace(plan, parameters=(), builder=None), example_inputs=torch.randn(4, 8))


def test_records_that_are_alike_are_written_once():
    """Any plain data comes back as it was, and 200 equal blocks take as much as two."""

    def blocks(count: int) -> list[Any]:
        names = ["layers.{i}.up", "layers.{i}.0.up7", "x{n}"]
        named = ([name.format(i=i, n=3 * i + (i > 1)) for name in names] for i in range(count))
        return [record for i, each in enumerate(named) for record in ([each, i, 8, 0.5, None], {"b": True, "a": -i})]

    few, many = (fold(blocks(count)) for count in (4, 200))
    assert unfold(many) == blocks(200) and len(json.dumps(many)) < 1.2 * len(json.dumps(few)) < 1500
    odd = [["#", 1], ["#", 2], "7", 7, "007", "a#1", "1e5", "9" * 40, True, [], {}, None, 1.5, ["a1"], ["a2"], ["a1"]]
    assert [*map(repr, unfold(json.loads(json.dumps(fold(odd)))))] == [*map(repr, odd)]


def deeper(plan: Plan, layers: int) -> Plan:
    """The plan of a Llama with two layers as it would be with more of the second one."""

    def renamed(text: str, i: int) -> str:
        """The name as it is `i` layers later; nodes are numbered through."""
        node = re.fullmatch(r"(\w+_)(\d+)", text)
        return f"{node[1]}{int(node[2]) + 40 * i}" if node else text.replace("layers.1.", f"layers.{i + 1}.")

    def more(records: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Each record, and after the last one what it is in the layers that come."""
        last = [r for r in records if "layers.1." in r.name + getattr(r, "module", "")]
        later = ({k: renamed(getattr(r, k), i) for k in names} for i in range(1, layers - 1) for r in last)
        return (*records, *(replace(last[j % len(last)], **names) for j, names in enumerate(later)))

    decisions = {renamed(name, i): how for i in range(layers - 1) for name, how in plan.decisions.items()}
    parameters = more(plan.parameters, ("name",))
    collectives = more(plan.collectives, ("module", "value", "source"))
    return replace(plan, parameters=parameters, collectives=collectives, decisions=decisions)


def test_equal_blocks_are_in_a_file_once():
    """The plan of 40 layers takes as much as that of 10, and comes back as it was."""
    deep, other = (deeper(planned_for("llama", 2), layers) for layers in (40, 10))
    text = deep.to_json()
    assert len(deep.parameters) > 9 * 39 and len(deep.decisions) > 2500 and len(deep.collectives) > 75
    again = Plan.from_json(text)
    assert again == deep and list(again.decisions) == list(deep.decisions) and again.to_json() == text
    assert len(text) < 1.1 * len(other.to_json()) < 100_000


def test_a_start_with_a_saved_plan_solves_nothing(model, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with patch.object(Builder, "build", side_effect=RuntimeError("solved")):
        again = autotp.compile(model, plan=Plan.load(tmp_path / "plan.json"), example_inputs=torch.randn(4, 8))
        assert again.plan == plan
        with pytest.raises(RuntimeError, match="solved"):
            autotp.compile(model, 2, example_inputs=torch.randn(4, 8))


def test_a_folder_for_captures_and_plans_is_not_used_in_silence(model, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AUTOTP_CACHE", "0")
    capture_model(model, normalise(torch.randn(4, 8)), torch.device("cpu"), check=False)
    assert not caplog.messages
    monkeypatch.setenv("AUTOTP_CACHE", str(tmp_path))
    for _ in range(2):
        capture_model(model, normalise(torch.randn(4, 8)), torch.device("cpu"), check=False)
    assert not list(tmp_path.iterdir())
    assert len(caplog.messages) == 1 and "keeps no captures and plans" in caplog.text and "Plan.load" in caplog.text
