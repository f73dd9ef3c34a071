"""What `regather` sends more in the backward, where a plan's memory is more than a device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from autotp.cost import call_seconds, collective_bytes, hidden_seconds
from autotp.cost.terms import Cost
from autotp.ir.program import Planned, Sharded
from autotp.passes.optimise.products import ProductGroup, groups
from autotp.passes.optimise.regather import too_large
from autotp.passes.shard.planner import Builder
from autotp.plans.plan import Plan

from .batch_axis import lengthened
from .layer_times import BACKWARD

CALL = "all_gather"


def with_regathering(plan: Plan, planned: Planned, sharded: Sharded, builder: Builder) -> Plan:
    """The plan with the values that are gathered again in its totals: bytes, and the seconds that no product hides.

    Args:
        plan: of the decisions `planned`, made by `builder`. sharded: the program of all ranks.
    """
    if plan.tp == 1 or not too_large(builder.objective, builder.cluster, plan.memory.peak):
        return plan
    sent_bytes = exposed = 0.0
    for _, size, seconds in gathered_again(planned, sharded, builder):
        sent_bytes += collective_bytes(CALL, size, plan.tp)
        exposed += seconds
    more = Cost(regathering=exposed, regathered_bytes=sent_bytes)
    return replace(plan, totals=lengthened(plan.totals, more, builder.objective)) if sent_bytes else plan


def gathered_again(planned: Planned, sharded: Sharded, builder: Builder) -> Iterator[tuple[fx.Node, float, float]]:
    """What `regather` gathers again: the conversion, bytes of the whole value, and seconds that no product hides.

    Args:
        planned: the decisions, made by `builder`. sharded: the program of all ranks.
    """
    for group in groups(sharded.graph):
        if group.gathers:
            size = builder.prices.bytes(group.conversion.meta["val"])
            alone = call_seconds(CALL, size, planned.tp, builder.cluster)
            beside = _gradient_seconds(group, planned, sharded, builder) if builder.cluster.overlaps else 0.0
            yield group.conversion, size, alone - hidden_seconds(alone, beside)


def _gradient_seconds(group: ProductGroup, planned: Planned, sharded: Sharded, builder: Builder) -> float:
    """Seconds of the products that make the gradient of the gathered value: each takes as long as its forward."""
    return sum(
        _forward(sharded.origin[p.node][0], planned, builder) for p in group.products if p.node in sharded.origin
    )


def _forward(node: fx.Node, planned: Planned, builder: Builder) -> float:
    decision, rule, prices = planned.decisions[node], planned.rules[node], builder.prices
    split = rule.factors[decision.factor] if rule is not None and decision.factor is not None else None
    return prices.seconds(prices.operator(planned.ops[node], decision.ins, decision.outs, split)) / (1 + BACKWARD)
