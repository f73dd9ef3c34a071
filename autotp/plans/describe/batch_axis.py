"""The cost of the data-parallel axis, in the plan: gradients and weights over it, group by group, and memory.

What the backward is too short to hide is a part of the step.

The groups are those of `autotp.runtime.data_parallel`: one for each repeated block, and one for what is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from autotp.comm.conversions import primitive
from autotp.cost import call_seconds, collective_bytes
from autotp.cost.memory import Memory
from autotp.cost.objective import Objective
from autotp.cost.terms import Cost
from autotp.ir.marks import mark
from autotp.ir.program import Planned
from autotp.ir.scopes import block_of
from autotp.passes.shard.planner import Builder
from autotp.plans.estimates import Axis, Totals
from autotp.plans.plan import Parameter, Plan


def described(plan: Plan, planned: Planned, builder: Builder, axis: Axis) -> Plan:
    """The plan with what the data-parallel axis costs: a call for each repeated block, and one for what is left.

    Args:
        plan: of one dp rank. planned, builder: what it was made from.
        axis: the size of the data-parallel axis, and whether weights are split over it.
    """
    if axis.size == 1:
        return plan
    prices, trained = builder.prices, {x.name for x in planned.program.leaves if x.node in planned.grads}
    sent_bytes = seconds = 0.0
    gathered: list[float] = [0.0]
    for weights in _blocks(plan.parameters).values():
        whole, graded = _bytes(weights), _bytes(p for p in weights if p.name in trained)
        gathered.append(whole)
        for call, size in _calls(axis, whole, graded if builder.objective.training else 0.0):
            sent_bytes += collective_bytes(call, size, axis.size)
            seconds += call_seconds(call, size, axis.size, builder.cluster, plan.tp)
    values = 0.0
    for op in planned.ops.values():
        if (over := mark(op.node).batch) is not None:
            values += _value_bytes(prices, op, *over[:3], op.node in planned.grads and builder.objective.training)
    computing = plan.totals.terms.get("compute", 0.0) + plan.totals.terms.get("launches", 0.0)
    backward = 2 / 3 * computing if builder.objective.training else 0.0
    priced = replace(axis, sent=sent_bytes, seconds=seconds, values=values, backward=backward)
    local = -(-plan.totals.local_parameters // axis.size) if axis.fully_shard else plan.totals.local_parameters
    own = axis.size if axis.fully_shard else 1  # of which each rank updates one part
    less = plan.totals.terms.get("optimizer", 0.0) * (1 / own - 1)
    apart = Cost(waiting=priced.exposed, optimizer=less)
    totals = lengthened(replace(plan.totals, local_parameters=local), apart, builder.objective)
    return replace(plan, batch=priced, totals=totals, memory=_split(plan.memory, axis, max(gathered)))


def lengthened(totals: Totals, cost: Cost, objective: Objective) -> Totals:
    """The totals with a cost that the solver does not decide over, in the step, its bound, and Megatron's step."""
    more = objective.seconds(cost)
    steps = {k: getattr(totals, k) + more for k in ("seconds", "bound", "megatron_step") if getattr(totals, k)}
    return replace(totals, terms=dict(Cost(**totals.terms) + cost), **steps)


def _calls(axis: Axis, whole: float, graded: float) -> list[tuple[str, float]]:
    """The collectives of a block in a step, with the bytes of the whole value."""
    if not axis.fully_shard:
        return [("all_reduce", graded)] if graded else []
    gathers = [("all_gather", whole)] * (2 if graded else 1)
    return [*gathers, *([("reduce_scatter", graded)] if graded else [])]


def _value_bytes(prices: Any, op: Any, src: Any, dst: Any, n: int, trained: bool) -> float:
    """Bytes that a rank sends for a conversion over the axis."""
    size = max(prices.bytes(op.slots[0].meta["val"]), prices.bytes(op.node.meta["val"]))
    ways = [(src, dst), (dst.dual, src.dual)] if trained else [(src, dst)]
    return sum(collective_bytes(primitive(a, b) or "none", size, n) for a, b in ways)


def _blocks(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    out: dict[str, list[Parameter]] = defaultdict(list)
    for p in parameters:
        out[block_of(p.name)].append(p)
    return out


def _bytes(parameters: Iterable[Parameter]) -> float:
    """The bytes of them on the fullest tp rank."""
    return float(sum(math.prod(p.local) * getattr(torch, p.dtype).itemsize for p in parameters))


def _split(memory: Memory, axis: Axis, gathered: float) -> Memory:
    if not axis.fully_shard:
        return memory
    parts = {k: getattr(memory, k) / axis.size for k in ("parameters", "gradients", "states")}
    return replace(memory, **parts, working=memory.working + gathered)
