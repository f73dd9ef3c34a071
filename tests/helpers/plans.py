"""Plans of the tiny models, made once for all tests, and the stages behind them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from autotp.api import plan as make_plan
from autotp.comm import conversions
from autotp.cost import Cluster
from autotp.driver.compile import Staged, capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.program import Planned, Sharded
from autotp.passes.shard.decide import decide
from autotp.passes.shard.planner import Builder
from autotp.passes.shard.rewrite import rewrite
from autotp.plans.plan import Parameter, Plan
from tests.helpers.models import BATCH, HIDDEN, LENGTH, captured, inputs_of, transformer


@cache
def planned_for(name: str, tp: int, **changed: Any) -> Plan:
    model = transformer(name, **changed)
    return make_plan(model, tp, example_inputs=inputs_of(model))


def staged(name: str, tp: int, sequence: bool | None = None, objective: str = "training") -> Staged:
    """The plan of a tiny model with the stages behind it."""
    return _staged(name, tp, sequence, objective)


@cache  # by what is asked, however the call is written
def _staged(name: str, tp: int, sequence: bool | None, objective: str) -> Staged:
    program, notes = captured(name)
    return plan_stages(
        program, notes, Options.read(tp, Steering(sequence_parallel=sequence, objective=objective)), name
    )


def stages(model: nn.Module, inputs: Inputs, tp: int) -> tuple[Planned, Sharded, Builder]:
    builder = Builder(capture_model(model, inputs, torch.device("cpu"))[0], tp, Cluster.resolve(None))
    planned = decide(builder)
    return planned, rewrite(planned, builder.prices.convert), builder


def parameter(plan: Plan, ending: str) -> Parameter:
    return next(p for p in plan.parameters if p.name.endswith(ending))


def blocks(plan: Plan) -> set[tuple[str, str]]:
    return {(b.kind, b.detail) for b in plan.blocks}


def of_tokens(model: nn.Module, tp: int = 2, **options: Any) -> Plan:
    return make_plan(model.eval(), tp, example_inputs=(torch.randn(BATCH, LENGTH, HIDDEN).requires_grad_(),), **options)


def communicating(sharded: Sharded, planned: Planned) -> int:
    """Conversions of a per-rank program that send bytes, read off the call targets alone."""
    primitives = {kind.name: kind.primitive for kind in conversions.KINDS.values()}
    count = 0
    for n in sharded.graph.nodes:
        name = getattr(n.target, "__name__", "")
        if n.op != "call_function" or name not in primitives:
            continue
        source, target = sharded.layouts[n.args[0]], sharded.layouts[n]
        back = conversions.KINDS.get(conversions.key(target.dual, source.dual))
        graded = sharded.origin[n][0] in planned.grads
        count += bool(primitives[name] or (graded and back is not None and back.primitive))
    return count
