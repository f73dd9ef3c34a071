"""Experts whole on each rank of dp, or dealt out over it: both are planned, and the faster that fits is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.errors import CaptureError, InputError, PlanError
from autotp.ir.graph import Capture, where
from autotp.ir.scopes import generic
from autotp.passes.shard.own_rows import experts_of, regions
from autotp.plans.estimates import refuse_travel
from autotp.plans.explain import explain
from autotp.plans.plan import Plan
from autotp.text import amount, divisors, seconds

from .options import Options

WORDS = {
    "compute": "kernels", "launches": "starting kernels", "communication": "sending rows and other values",
    "optimizer": "the optimizer's step", "waiting": "waiting for gradients over dp",
}  # fmt: skip


def choose_experts(
    captured: Callable[..., tuple[Capture, list[str]]], solve: Callable[..., Plan], options: Options,
    keywords: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Plan with experts over every number of ranks of dp, and return the fastest that fits, with the others' prices.

    Args:
        captured: makes the program of a rank of dp, by tp, axes, and whether it is held against the model.
        solve: plans that, by program, notes and options. keywords: of `autotp.plan`.
        options: with dp; `memory`: bytes that a rank may hold, by default the device's.

    Raises:
        InputError: there is no dp, or what goes with whole experts alone. PlanError: nothing fits `memory`.
    """
    axes, tp = options.batch, options.tp
    if axes.dp == 1:
        raise InputError("ep='auto' deals experts to ranks of dp, and dp is 1. Give dp, or leave out ep.")
    refuse_travel(replace(axes, ep=axes.dp), keywords)
    program, notes = captured(tp, axes)
    plans, errors = dict[int, Plan](), []
    for ep in divisors(math.gcd(axes.dp, experts_of(program))):
        dealt = replace(axes, ep=ep)
        try:
            own = (program, notes) if ep == 1 else captured(tp, dealt, False)
            plans[ep] = solve(*own, replace(options, batch=dealt))
        except (CaptureError, InputError, PlanError) as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    limit = options.cluster.memory_size if options.memory is None else options.memory

    def rank(plan: Plan) -> tuple[bool, float]:
        over = plan.memory.peak > limit
        return over, plan.memory.peak if over else plan.totals.seconds

    best, *others = sorted(plans.values(), key=rank)
    names = {leaf.node: leaf.name for leaf in program.leaves}
    mixtures = {generic(where(x)): w for region in regions(program) for x, (_, w) in region.products.items()}
    why = _why(best, others[0], limit) if others else "no number of ranks has as many experts each"
    priced = "; ".join(f"{_way(plan)}: {seconds(plan.totals.seconds)}, {amount(plan.memory.peak)}" for plan in others)
    text = f"ep='auto': {_way(best)}, {seconds(best.totals.seconds)} a step: {why}{f' ({priced})' if priced else ''}"
    ways = [f"{name}: {_way(best)}{_over_tp(best, w, names)}" for name, w in mixtures.items()]
    return replace(best, notes=(*best.notes, text, *ways))


def _over_tp(plan: Plan, weight: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Words for how tp splits experts, with the prices of a step by each way."""
    if plan.tp == 1:
        return ""
    while weight not in names:
        weight = weight.all_input_nodes[0]
    own, *_ = ways = explain(plan, names[weight]).alternatives
    more, texts = plan.totals.seconds - own.seconds, []
    for words, by_expert in (("by expert", True), ("within the expert", False)):
        steps = [x.seconds + more for x in ways if not x.why and ("Shard(0)" in x.layout) == by_expert]
        texts += [f"{words} {seconds(min(steps))}"] if steps else []
    return f"; over tp {own.layout}: a step is {' and '.join(texts)}"


def _way(plan: Plan) -> str:
    """Words for where experts are."""
    return f"rows travel over ep={plan.batch.ep}" if plan.batch.ep > 1 else "experts whole on each dp rank"


def _why(best: Plan, other: Plan, limit: float) -> str:
    """Say what the next best takes more of."""
    if best.memory.peak <= limit < other.memory.peak:
        return f"{_way(other)} does not fit"
    more = {name: other.totals.terms.get(name, 0.0) - best.totals.terms.get(name, 0.0) for name in WORDS}
    most = max(more, key=more.__getitem__)
    return f"{_way(other)} takes {seconds(more[most])} longer for {WORDS[most]}"
