"""Where groups end: a number in a layout, which each of equal blocks reads as the value of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate

from autotp.cost.solver.problem import ValueId
from autotp.driver.compile import capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.errors import PlanError
from autotp.inputs import Inputs
from autotp.ir.decisions import plain, read_layout
from autotp.ir.layouts import Grouped, Groups, Partition
from autotp.ir.program import Planned
from autotp.passes.shard.ends import ends_of
from autotp.passes.shard.planner import Builder
from autotp.passes.stages.balance import stage_starts, units_of
from autotp.passes.stages.cut import cut
from tests.helpers.plans import stages

EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        ends = torch.cumsum(groups, 0, dtype=torch.int32)
        return nn.functional.relu(nn.functional.grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends)).float()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that what each layer reads has a gradient
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.softmax(layer(x, groups), 0)  # over all rows: none go on by group
        return x


@pytest.fixture(scope="module")
def planned() -> tuple[Planned, Builder]:
    inputs = Inputs(torch.randn(8, WIDTH), torch.full((EXPERTS,), 2))
    planned, _, builder = stages(Blocks(), inputs, 2)
    return planned, builder


def of_kind(planned: Planned, name: str) -> list[fx.Node]:
    return [n for n in planned.ops if name in str(n.target)]


def test_equal_blocks_have_one_number_and_ends_of_their_own(planned: tuple[Planned, Builder]):
    table = planned[0].ends
    sums, products, relus = (of_kind(planned[0], name) for name in ("cumsum", "grouped_mm", "relu"))
    assert table == (tuple((n, 0) for n in sums),) and len(sums) == 2
    for nodes in (products, relus):
        assert [ends_of(planned[0], 0, n) for n in nodes] == [(n, 0) for n in sums]


def test_candidates_name_no_node(planned: tuple[Planned, Builder]):
    builder = planned[1]
    known: dict[tuple[ValueId, int], list] = builder.candidates.of  # type: ignore[assignment]
    ends = {p.ends for partitions in known.values() for p in partitions if isinstance(p, Groups)}
    assert ends == {0}
    names = {n.name for n in builder.program.graph.nodes}
    written = json.dumps(plain([p for partitions in known.values() for p in partitions]))
    assert not [name for name in names if f'"{name}"' in written]


def test_a_number_without_its_values_is_an_error(planned: tuple[Planned, Builder]):
    relu = of_kind(planned[0], "relu")[0]
    with pytest.raises(PlanError, match="0 values for 2 operators"):
        ends_of(planned[0], 1, relu)
    one = dataclasses.replace(planned[0], ends=(planned[0].ends[0][:1],))
    with pytest.raises(PlanError, match="1 values for 2 operators"):
        ends_of(one, 0, relu)


def test_a_name_in_a_file_is_no_number():
    layout = Grouped(0, Groups(3, Partition.plain(EXPERTS, 2)))
    written = plain(layout)
    assert read_layout(written) == layout
    written["groups"]["ends"] = "cumsum"
    with pytest.raises(TypeError, match="'cumsum', which is no number"):
        read_layout(written)


def test_rows_by_expert_are_refused_with_a_pin_that_cuts_them() -> None:
    inputs = Inputs(torch.randn(8, WIDTH), torch.full((EXPERTS,), 2))
    captured, notes = capture_model(Blocks(), inputs, torch.device("cpu"))

    def pieces(pins: Any) -> int:
        made = plan_stages(captured, notes, Options.read(2, Steering(pins=pins)), "Blocks")
        return len(cut(made.planned, made.sharded, stage_starts(units_of(made.planned, made.sharded), (1, 1))))

    with pytest.raises(PlanError, match=r"sharded by expert.* pins={'layers\.\*\.\*': Replicate\(\)}"):
        pieces(None)
    assert pieces({"layers.*.*": Replicate()}) == 2
