"""Costs of the data-parallel axis in a plan: gradients and weights over it, group by group, and memory.

What the backward is too short to hide is a part of the step. The groups are those of `autotp.runtime.data_parallel`:
one for each repeated block, and one for what is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch

from autotp.cost.collective_costs import collective_bytes
from autotp.cost.meshes import Mesh, Sends, weight_sends
from autotp.cost.objective import Objective
from autotp.cost.terms import Cost
from autotp.cost.units import Works
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import block_of
from autotp.passes.shard.planner import Builder
from autotp.plans.estimates import Axes, Totals
from autotp.plans.plan import Parameter, Plan


def with_axis(plan: Plan, planned: Planned, sharded: Sharded, builder: Builder, axis: Axes) -> Plan:
    """Return the plan with the costs of the data-parallel axis: a call for each repeated block, and one for the rest.

    Args:
        plan: of one dp rank. planned, sharded, builder: what it was made from.
        axis: the size of the data-parallel axis, and whether weights are split over it.
    """
    if axis.size == 1:
        return plan
    prices, training = builder.prices, builder.objective.training
    trained = {x.name for x in planned.program.leaves if x.node in planned.grads and training}
    mesh = Mesh(1, axis.size, 1, plan.tp, fully_shard=axis.fully_shard)
    groups = defaultdict(list)
    for p in plan.parameters:
        groups[block_of(p.name), planned.program.owned.get(p.name, 1)].append(p)
    # Group by group, as `fully_shard` and DDP send them: each call starts anew.
    sends = Sends()
    for (_, owners), weights in groups.items():
        if owners == 1:
            graded = _bytes(p for p in weights if p.name in trained)
            sends = sends.plus(weight_sends(mesh, _bytes(weights), builder.cluster, graded))
    # What the program itself converts over this axis, such as a loss over all rows, is in the solver's seconds already.
    values = 0.0
    for op in planned.ops.values():
        if (over := mark(op.node).batch) is not None:
            ways = prices.across(op, over, prices.share(planned.decisions[op.node].outs[0]))
            values += sum(collective_bytes(name, size, ranks) for _, name, size, ranks in ways)
    # Gradients are sent beside the kernels of the backward: what goes over tp then has the links to itself.
    backward = [work.directions[1] for *_, work in Works(planned, prices).walk(sharded)]
    priced = replace(
        axis, sent=sends.bytes, seconds=sends.seconds, values=values, experts=tuple(planned.program.owned),
        backward=sum(seconds for seconds, call in backward if call is None),
    )  # fmt: skip
    parts = 1.0  # of which each rank holds and updates one
    if axis.fully_shard:
        parts = axis.size * _bytes(plan.parameters) / sum(owners * _bytes(x) for (_, owners), x in groups.items())
    less = plan.totals.terms.get("optimizer", 0.0) * (1 / parts - 1)
    totals = replace(plan.totals, local_parameters=math.ceil(plan.totals.local_parameters / parts))
    totals = lengthened(totals, Cost(waiting=priced.exposed, optimizer=less), builder.objective)
    # Split weights leave a rank its part, and the whole of one group while that runs.
    memory = plan.memory
    if axis.fully_shard:
        local = {k: getattr(memory, k) / parts for k in ("parameters", "gradients", "states")}
        memory = replace(memory, **local, working=memory.working + max(map(_bytes, groups.values()), default=0.0))
    return replace(plan, batch=priced, totals=totals, memory=memory)


def lengthened(totals: Totals, cost: Cost, objective: Objective) -> Totals:
    """Return the totals with a cost that the solver does not decide over, in the step, its bound, Megatron's step."""
    extra = objective.seconds(cost)
    steps = {k: getattr(totals, k) + extra for k in ("seconds", "bound", "megatron_step") if getattr(totals, k)}
    return replace(totals, terms=dict(Cost(**totals.terms) + cost), **steps)


def _bytes(parameters: Iterable[Parameter]) -> float:
    """Return the bytes of them on the fullest tp rank."""
    return float(sum(math.prod(p.local) * getattr(torch, p.dtype).itemsize for p in parameters))
