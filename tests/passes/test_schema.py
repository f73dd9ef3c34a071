"""`verify` misses nothing that a pass may forget: a field is taken off, and the error names the pass and the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from autotp.cost import Cluster
from autotp.cost.objective import TRAINING
from autotp.driver.compile import capture_model
from autotp.errors import SchemaError
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.ir.layouts import I, P, R
from autotp.ir.marks import NOTHING, Mark, conversion_of, inherit, mark, write
from autotp.ir.op import aten
from autotp.ir.program import MeshPlace, Planned, Sharded
from autotp.passes.base import Changes, Pass, run_passes
from autotp.passes.optimise.optimisation import Optimisation, RankProgram, Setting
from autotp.passes.schema import captured, converts, verify
from autotp.passes.shard.batch_axis import BatchRules
from autotp.passes.shard.deal import DealAxis
from autotp.passes.shard.decide import decide
from autotp.passes.shard.planner import Builder
from autotp.passes.shard.rewrite import rewrite, specialise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        with torch.no_grad():
            scale = x.abs().amax() + 1
        return (self.down(self.up(x).relu()) / scale).mean()


@dataclasses.dataclass
class Programs:
    """The program of the whole batch, that of one dp rank, that of all tp ranks with its decisions, and of one rank."""

    whole: Capture
    local: Capture
    planned: Planned
    sharded: Sharded

    def rank(self) -> fx.Graph:
        return specialise(self.sharded, {"tp": MeshPlace(0, 2, ""), "dp": MeshPlace(0, 2, "")})


@pytest.fixture(scope="module")
def programs() -> Programs:
    whole, _ = capture_model(Block(), Inputs(torch.randint(16, (4, 6))), torch.device("cpu"), False)
    local = dataclasses.replace(whole)
    run_passes(local, (DealAxis(BatchRules, 2),))
    builder = Builder(local, 2, Cluster.resolve(None))
    planned = decide(builder)
    return Programs(whole, local, planned, rewrite(planned, builder.prices.convert))


def without(field: str, node: fx.Node, check: Callable[[], None]) -> str:
    """The error's message where the node's mark lacks the field; the mark is put back afterwards."""
    before = mark(node)
    assert getattr(before, field) is not None
    write(node, **{field: None})
    try:
        with pytest.raises(SchemaError) as caught:
            check()
    finally:
        node.meta["autotp"] = before
    check()
    return str(caught.value)


# field -> which program it is taken off, and from which of its nodes
PLACES: dict[str, tuple[str, Callable[[fx.Node], bool]]] = {
    "no_grad": ("local", lambda n: n.target is aten.relu.default),
    "batch": ("local", converts),
    "layout": ("sharded", lambda n: n.target is aten.relu.default),
    "conversion": ("sharded", lambda n: mark(n).conversion is not None),
    "axis": ("sharded", lambda n: "vocabulary" in str(n.target)),
    "scope": ("sharded", lambda n: mark(n).conversion is not None),
}
REMEMBERED = {"flops", "saved"}  # what was computed of a node, and is again where it is not there


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Mark)])
def test_a_field_that_a_pass_forgot_is_an_error_that_names_the_pass_and_the_node(field, programs):
    if field in REMEMBERED:
        assert field in {fault.field for fault in captured(programs.local)}  # such as of another size
        with pytest.raises(SchemaError, match="after the batch axis: .* is left from another program"):
            verify(programs.local, "the batch axis")
        return
    stage, fits = PLACES[field]
    program = getattr(programs, stage)
    known: dict[str, Any] = {"priced": True} if stage == "local" else {"planned": programs.planned}
    node = next(n for n in program.graph.nodes if fits(n))
    told = without(field, node, lambda: verify(program, "my pass", **known))
    assert "after my pass" in told and f"%{node.name} " in told and f"'{field}' is not written" in told


@pytest.mark.parametrize("field", sorted(REMEMBERED))
def test_what_is_remembered_is_computed_again(field, programs):
    before = {n: getattr(mark(n), field) for n in programs.local.graph.nodes}
    for node in before:
        write(node, **{field: None})
    builder = Builder(programs.local, 2, Cluster.resolve(None))
    decide(builder)
    for node, remembered in before.items():
        assert remembered is None or getattr(mark(node), field) == remembered


@pytest.mark.parametrize("layout", [I, P])
def test_a_value_that_does_not_lie_as_it_was_decided_is_an_error(layout, programs):
    """Though mark and program say the same."""
    sharded, planned = programs.sharded, programs.planned
    node = next(n for n in sharded.graph.nodes if n.target is aten.relu.default)
    before = sharded.layouts[node]
    try:
        sharded.layouts[node] = layout
        write(node, layout=layout)
        with pytest.raises(SchemaError) as caught:
            verify(sharded, "rewrite", planned=planned)
        assert node.name in str(caught.value) and f"decided is {before}" in str(caught.value)
    finally:
        sharded.layouts[node] = before
        write(node, layout=before)


def test_a_conversion_that_says_another_is_an_error(programs):
    node = next(n for n in programs.sharded.graph.nodes if mark(n).conversion is not None)
    before = mark(node)
    write(node, conversion=(conversion_of(node)[0], R if before.layout != R else I))
    with pytest.raises(SchemaError, match="'conversion' is"):
        verify(programs.sharded, "rewrite", planned=programs.planned)
    node.meta["autotp"] = before


@dataclasses.dataclass(frozen=True)
class Careless(Pass[Capture]):
    """Puts a call in the graph and says nothing of it."""

    name = "careless"

    def run(self, program: Capture) -> Changes:
        node = next(n for n in program.graph.nodes if n.target is aten.relu.default)
        with program.graph.inserting_after(node):
            new = program.graph.call_function(aten.clone.default, (node,))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new, lambda user: user is not new)
        return Changes(1)


def test_run_passes_names_the_pass():
    inputs = Inputs(torch.randint(16, (4, 9)))  # of a capture that nothing has planned
    whole = capture_model(Block(), inputs, torch.device("cpu"), False)[0]
    with pytest.raises(SchemaError, match="after pass careless: %clone_default .*'no_grad'"):
        run_passes(whole, [Careless()])


@dataclasses.dataclass(frozen=True)
class Twice(Optimisation):
    """Clones what relu gives; `forgets` is what it does not write of the new call."""

    name = "twice"
    forgets: str = ""

    def run(self, program: RankProgram) -> Changes:
        graph = program.graph
        node = next(n for n in graph.nodes if n.target is aten.relu.default)
        with graph.inserting_after(node):
            new = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(new, lambda user: user is not new)
        inherit(new, node, **({} if self.forgets == "scope" else {"scope": ()}))
        if self.forgets == "axis":  # of a call that was there
            write(next(n for n in graph.nodes if mark(n).axis), axis=None)
        return Changes(1, "once")


@pytest.mark.parametrize("forgets", ["", "scope", "axis"])
def test_it_names_an_optimisation(forgets, programs):
    place = MeshPlace(0, 2, "")
    setting = Setting(place, Cluster.resolve(None), TRAINING, torch.device("cpu"))
    program = RankProgram(programs.rank(), setting)
    if not forgets:
        assert run_passes(program, (Twice(forgets),)) == (("twice", Changes(1, "once")),)
        return
    with pytest.raises(SchemaError, match=rf"after pass twice: .*'{forgets}' is not written"):
        run_passes(program, (Twice(forgets),))


def test_without_the_switch_nothing_is_checked(programs, monkeypatch):
    monkeypatch.setenv("AUTOTP_VERIFY", "0")
    node = next(n for n in programs.local.graph.nodes if mark(n).no_grad is not None)
    before = mark(node)
    node.meta["autotp"] = NOTHING
    verify(programs.local, "my pass")
    node.meta["autotp"] = before


def test_marks_are_copied_with_their_graph(programs):
    copied = fx.Graph()
    copied.graph_copy(programs.sharded.graph, {})
    pairs = zip(programs.sharded.graph.nodes, copied.nodes, strict=False)
    assert all(mark(a) == mark(b) for a, b in pairs) and any(mark(n).layout for n in copied.nodes)
