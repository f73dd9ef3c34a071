"""Planner and rewriter ask an object about their mesh axis; nobody inherits from them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

from autotp.cost import Cluster
from autotp.cost.prices import Prices
from autotp.driver.compile import capture_model
from autotp.inputs import Inputs
from autotp.ir.graph import Capture, Leaf
from autotp.ir.layouts import I, Layout, P, Partition, Shard
from autotp.ir.op import Op, aten
from autotp.ir.program import Planned
from autotp.passes.shard.axis import TENSOR, AxisRules, TensorWriter
from autotp.passes.shard.decide import decide
from autotp.passes.shard.planner import Builder
from autotp.passes.shard.rewrite import Rewriter
from autotp.passes.shard.strategies import Candidates
from autotp.rules.local import Sizes


@pytest.mark.parametrize("final", [Builder, Rewriter, Prices, Candidates, Sizes])
def test_nobody_inherits_from_planner_and_rewriter(final):
    for folder in ("passes", "proof", "driver", "plans", "rules"):
        for module in pkgutil.walk_packages(importlib.import_module(f"autotp.{folder}").__path__, f"autotp.{folder}."):
            importlib.import_module(module.name)
    assert not [x for x in final.__subclasses__() if x.__module__.startswith("autotp")]


@pytest.fixture(scope="module")
def captured() -> Capture:
    class Two(nn.Sequential):
        """Megatron's pair: tensor parallelism splits both weights, and adds up once."""

    model = Two(nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False))
    return capture_model(model, Inputs(torch.randn(4, 16)), torch.device("cpu"), False)[0]


def planned(captured: Capture, axis: Any = TENSOR) -> tuple[Builder, Planned]:
    builder = Builder(captured, 2, Cluster.resolve(None), axis=axis)
    return builder, decide(builder)


def weights(plan: Planned) -> list[Layout]:
    return [plan.decisions[x.node].outs[0] for x in plan.program.leaves if x.kind.trained]


@dataclass(frozen=True)
class Whole(AxisRules):
    """An axis on which the second weight must be whole."""

    def leaf(self, leaf: Leaf, graded: bool, ranks: int) -> Layout | None:  # type: ignore[override]
        return I if leaf.name == "1.weight" else None


@dataclass(frozen=True)
class Rows(AxisRules):
    """An axis on which outputs leave split by columns."""

    def outputs(self, program: Capture, grads: Any, ranks: int, partitions: Any) -> tuple[Layout, ...]:  # type: ignore[override]
        return (Shard(1, Partition.plain(16, ranks)),)


@dataclass(frozen=True)
class Dear:
    """Makes summands dearer than anything."""

    def operator(self, op: Op, outs: tuple[Layout, ...], nbytes: Any) -> float:
        return 1.0 if P in outs else 0.0

    def conversion(self, a: Layout, b: Layout, nbytes: float) -> float:
        return 0.0


class Priced(AxisRules):
    """An axis with prices of its own."""

    @property
    def surcharge(self) -> Dear:  # type: ignore[override]
        return Dear()


def test_what_a_leaf_may_be_is_asked(captured):
    assert [str(x) for x in weights(planned(captured)[1])] == ["S(0)", "S(1)"]
    first, second = weights(planned(captured, Whole())[1])
    assert second == I and first != second


def test_what_an_output_must_be_is_asked(captured):
    builder, plan = planned(captured, Rows())
    last = next(n for n in reversed(captured.graph.nodes) if n.target is aten.linear.default)
    assert builder.goals() == (Shard(1, Partition.plain(16, 2)),) and plan.decisions[last].outs[0] in (
        P,
        *builder.goals(),
    )


def test_what_the_axis_costs_is_asked(captured):
    assert any(P in d.outs for d in planned(captured)[1].decisions.values())
    assert not any(P in d.outs for d in planned(captured, Priced())[1].decisions.values())


class Noted(TensorWriter):
    """Returns the last output twice, and counts what was written for each operator."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "counts", [])

    def emitted(self, node: fx.Node, new: Iterable[fx.Node]) -> None:
        self.counts.append([n.name for n in new])  # type: ignore[attr-defined]

    def leave(self, graph: fx.Graph, planned: Planned, values: Sequence[Any]) -> tuple[Any, ...]:
        return (*values, values[-1])


def test_the_writer_is_asked_too(captured):
    builder, plan = planned(captured)
    writer: Any = Noted()
    sharded = Rewriter(plan, builder.prices.convert, writer).run()
    assert len(sharded.graph.output_node().args[0]) == 2  # type: ignore[arg-type]
    assert len(writer.counts) == 2 and all(writer.counts)
    assert sharded.result(0)[0] == sharded.result(1)[0] == I
