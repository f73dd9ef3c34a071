"""The order of the passes: every pass has a place, and each run is logged with what it changed."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autotp
from autotp import log
from autotp.capture.request import CaptureRequest
from autotp.driver.schedule import schedule
from autotp.ir.graph import Capture
from autotp.ir.op import aten
from autotp.passes.base import Changes, Pass, run_passes
from autotp.passes.optimise import Optimisation
from autotp.passes.shard.deal import DealAxis
from autotp.text import BESIDE
from tests.helpers.modules.heads import captured

X = torch.randn(4, 6)


@dataclass(frozen=True)
class DoubleProducts(Pass[Capture]):
    """A pass of the tests' own, with an option."""

    name: ClassVar[str] = "double-products"
    least: int = 1

    def idle(self, program: Capture) -> str:
        """Where there are few."""
        return "" if len(_products(program)) >= self.least else "too few products"

    def run(self, program: Capture) -> Changes:
        program.own_graph()
        products = _products(program)
        for node in products:
            with program.graph.inserting_after(node):
                twice = program.graph.call_function(aten.mul.Tensor, (node, 2.0))
            twice.meta = dict(node.meta)
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, new=twice: user is not new)
        return Changes(len(products), "products are twice as large")


def _products(program: Capture) -> list[Any]:
    return [n for n in program.graph.nodes if n.target is aten.linear.default]


def everyone(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from everyone(each)


def test_every_pass_of_the_library_has_one_place_in_the_order():
    order = schedule(CaptureRequest(dp=2, outputs="loss"))
    placed = [type(each) for stage in order for each in stage]
    ours = {x for x in everyone(Pass) if x.__module__.startswith("autotp.")} - {Optimisation}
    dealt = [each.policy.axis for each in order.requested if isinstance(each, DealAxis)]
    assert dealt == [*BESIDE], "one pass for both, dp first"
    placed.remove(DealAxis)
    assert set(placed) == ours and len(placed) == len(ours) > 20
    assert len({each.name for stage in order for each in stage}) == len(placed)
    assert (order.requested[0], order.requested[1]) != schedule().requested[:2], "options are the request's"


def test_the_docs_show_the_order():
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    for kind, stage in schedule()._asdict().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {kind} |"))
        assert re.findall("`(.*?)`", row) == [each.name for each in stage]


def test_a_pass_is_a_frozen_record():
    for each in (x for stage in schedule() for x in stage):
        assert all(hasattr(each, f.name) for f in fields(each)) and replace(each) == each
        for option in fields(each):
            with pytest.raises(FrozenInstanceError):
                setattr(each, option.name, None)


def test_what_passes_did_is_returned_and_logged(caplog):
    program = captured(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), X)
    own = replace(program)
    with caplog.at_level(logging.DEBUG, "autotp"):
        results = run_passes(own, (DoubleProducts(), DoubleProducts(least=3)))
    assert results == (("double-products", Changes(2, "products are twice as large")), (
        "double-products", Changes(0, "too few products")))  # fmt: skip
    assert "pass double-products: 2 changes (products are twice as large), " in caplog.text
    assert "pass double-products: 0 changes (too few products), " in caplog.text
    assert own.graph is not program.graph and own.digest() != program.digest()
    assert own.leaves[0].node.graph is own.graph


@pytest.mark.parametrize(("asked", "count"), [(None, 0), (True, 2), (False, 0)])
def test_a_switch_overrules_what_a_pass_decides_by_itself(asked, count):
    program = captured(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), X)
    switches = {} if asked is None else {"double-products": asked}
    ((_, changes),) = run_passes(replace(program), (DoubleProducts(least=3),), switches)
    assert changes.count == count
    assert changes.what == {None: "too few products", False: "switched off"}.get(asked, "products are twice as large")


def test_a_graph_that_a_pass_breaks_is_refused():
    @dataclass(frozen=True)
    class Breaks(Pass[Capture]):
        name: ClassVar[str] = "breaks"

        def run(self, program: Capture) -> Changes:
            first, second = _products(program)
            first.args = (second, *first.args[1:])
            return Changes(1)

    program = replace(captured(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), X))
    program.own_graph()
    with pytest.raises(RuntimeError, match="topologically ordered"):
        run_passes(program, (Breaks(),))


def test_the_debug_log_shows_the_order(caplog):
    with caplog.at_level(logging.DEBUG, "autotp"):
        autotp.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), 2, example_inputs=X)
    lines = [line.split(": ")[0] for line in caplog.messages if line.startswith("pass ")]
    order = schedule()
    twice = [*order.sharded, *order.sharded]  # for the plan, and for the program that runs, of what is read once
    names = [
        x.name
        for x in (
            *order.exported,
            *order.canonical,
            *order.requested,
            *order.agreed,
            *order.planned,
            *twice,
            *order.rank,
        )
    ]
    assert lines == [f"pass {name}" for name in names]
    assert any("counted-random: 1 changes (operators draw by counters)" in line for line in caplog.messages)


def test_of_a_long_stage_is_said_that_it_goes_on(caplog):
    with patch.object(log, "LATE", 1e-3), caplog.at_level(logging.INFO, "autotp"), log.stage("capture"):
        while not caplog.records:
            time.sleep(1e-3)
    assert caplog.records[0].getMessage() == "capture: 0 s so far"
    with patch.object(threading, "Thread", side_effect=AssertionError), log.stage("capture"):
        pass  # nobody asked
