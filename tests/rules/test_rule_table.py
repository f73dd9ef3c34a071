"""docs/rules.md says what the code says, and every pointwise operator of torch is proved."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from autotp.rules.core import RULES, function_of, overloads
from tests.rules import rule_table
from tests.rules.cases import CASES

aten: Any = torch.ops.aten
pinned = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is written with torch 2.13")


@pinned
def test_the_page_is_up_to_date():
    written = rule_table.PAGE.read_text(encoding="utf-8").partition(rule_table.WITHOUT)[0]
    assert written.rstrip() == rule_table.rules_part().rstrip(), "the rules or their cases changed: make docs"


def test_a_changed_rule_would_change_the_page(monkeypatch):
    few = [c for c in CASES if c.target in (aten.mm.default, aten.bmm.default)]
    monkeypatch.setattr(rule_table, "CASES", few)
    before = rule_table.rules_part()
    right = RULES[aten.mm.default]
    monkeypatch.setitem(RULES, aten.mm.default, lambda op: replace(right(op), linear=()))
    assert rule_table.rules_part() != before
    monkeypatch.setattr(rule_table, "CASES", few[:1])
    assert "`bmm`" in before and "`bmm`" not in rule_table.rules_part()


def test_operators_without_a_rule_are_still_without():
    part = rule_table.PAGE.read_text(encoding="utf-8").partition(rule_table.WITHOUT)[2]
    assert [name for name in re.findall(r"^\| `([^`]+)`", part, re.MULTILINE) if not rule_table.lacks_rule(name)] == []


def test_what_measured_models_lack_is_listed():
    found = {"aten.nonzero": [2, "a"], "aten.mm": [9, "b"], "aten.sym_size.int": [9, "b"], "x.y": [3, "c"]}
    part = rule_table.without_part({"models": {"a": {}, "b": {}}, "operators_without_rule": found})
    assert "Met in 2 models" in part
    assert re.findall(r"^\| `([^`]+)` \| (\d)", part, re.MULTILINE) == [("x.y", "3"), ("aten.nonzero", "2")]
    assert "None." in rule_table.without_part({})


def test_the_measured_results_can_be_read():
    if rule_table.MODELS.exists():
        rule_table.without_part(json.loads(rule_table.MODELS.read_text(encoding="utf-8")))


def test_a_wrong_rule_is_not_written(monkeypatch):
    monkeypatch.setitem(RULES, aten.softmax.int, RULES[aten.relu6.default])
    monkeypatch.setattr(rule_table, "CASES", [c for c in CASES if c.target is aten.softmax.int])
    with pytest.raises(Exception, match=r"the rule of aten.softmax.int.*is wrong"):
        rule_table.proved()


@pinned
def test_every_pointwise_operator_is_proved():
    every = {n.partition("::")[2].partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if "aten::" in n}
    packets = [getattr(aten, name, None) for name in every]
    tagged = {
        str(p) for p in packets if hasattr(p, "overloads") for t in overloads(p) if function_of(t) is RULES["pointwise"]
    }
    assert len(tagged) > 150
    unproved = tagged - {str(cast(Any, c.target).overloadpacket) for c in CASES}
    assert not unproved
