"""A plan made from a saved one: for another depth, degree or width of the same architecture."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autotp.errors import InputError, PlanError
from autotp.ir.graph import Capture
from autotp.ir.scopes import generic
from autotp.passes.shard.pins import Dims
from autotp.plans.plan import Parameter, Plan
from autotp.text import listed

from .options import Options

PINNED = "pinned by the user"  # as `autotp.plans.describe.reasons` says it of what a pin kept whole


def plan_like(like: Any, tp: Any, captured: Capture, options: Options, solve: Callable[[Options], Plan]) -> Plan:
    """Make a plan in which every parameter has the placement of its equal in another plan, where that is legal.

    A saved plan's placements of a repeated block hold for all blocks: numbers in names are not compared. At another
    `tp`, or with other sizes, a part is decided anew if its heads do not divide by the ranks of either plan, or if its
    placement is not legal any more. The plan's notes name these parts.

    Args:
        like: the plan. tp: as the user gave it. captured: the model. options: with the user's pins, which come first.
        solve: makes a plan of the model.

    Raises:
        PlanError: the plan is for another architecture.
    """
    if not isinstance(like, Plan):
        raise InputError(f"like is {type(like).__name__}; give what autotp.plan returns, or Plan.load(path).")
    if tp == "auto":
        raise InputError("like= keeps what a plan decided, and tp='auto' compares plans. Give a number, of ep too.")
    shapes = {x.name: tuple(x.node.meta["val"].shape) for x in captured.leaves if x.kind.trained}
    saved = _saved(like, shapes)
    equal = like.tp == tp and _equal_shapes(saved, shapes)
    freed: dict[str, str] = {}
    pins = _pins(saved, shapes, like)
    # Every round lets go of some of the earlier plan's pins, so there are at most as many as pins.
    while True:
        # The user's own come first, and of two patterns that fit a name the first counts.
        others = {k: d for k, d in pins.items() if k not in options.pins}
        plan, freed_now = _plan_under(solve, replace(options, pins={**options.pins, **others}), pins)
        # At the same degree and sizes what was legal is so still. At others half a head may be legal, and is not meant.
        if plan is not None and not equal:
            reasons = _undivided(plan, tp, like.tp)
            freed_now = {k: reasons[generic(k)] for k in pins if generic(k) in reasons}
        if plan is not None and not freed_now:
            return _noted(plan, like, pins, freed, saved, options.pins)
        freed |= freed_now
        pins = {k: d for k, d in pins.items() if k not in freed_now}


def _equal_shapes(saved: Mapping[str, list[Parameter]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Say whether every parameter has the shape of one that the plan has under its name without numbers."""
    planned = {(name, p.shape) for name, parameters in saved.items() for p in parameters}
    return all((generic(name), shape) in planned for name, shape in shapes.items())


def _plan_under(
    solve: Callable[[Options], Plan], options: Options, pins: Mapping[str, Any]
) -> tuple[Plan | None, dict[str, str]]:
    """Make the plan under these pins, or return those of the earlier plan that cannot be kept, with the reasons."""
    try:
        return solve(options), {}
    except PlanError as e:
        reasons = {k: str(e).split(". ")[0] for k in pins if repr(k) in str(e)}
        if not reasons:
            raise
        return None, reasons


def _saved(like: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Parameter]]:
    """Group the plan's parameters by name without numbers.

    Raises:
        PlanError: the model has others.
    """
    saved: dict[str, list[Parameter]] = defaultdict(list)
    for p in like.parameters:
        saved[generic(p.name)].append(p)
    have = {(generic(n), len(shape)) for n, shape in shapes.items()}
    want = {(key, len(p.shape)) for key, ps in saved.items() for p in ps}
    if have != want:
        sides = {False: "plan", True: "model"}
        names = [f"{x[0]}, which only the {sides[x in have]} has" for x in sorted(have ^ want)]
        raise PlanError(
            f"like= is a plan for {like.model} with other parameters than this model has, such as "
            f"{'; '.join(names[:3])}. Give a plan for the same architecture (depth, widths and tp may differ), or none."
        )
    return saved


def _undivided(plan: Plan, *tps: int) -> dict[str, str]:
    """Find the parameters, by name without numbers, of attentions whose heads do not divide by one of these degrees,
    with the reason."""
    builder, out = plan.builder, {}
    assert builder is not None  # the plan was just made
    for block in builder.parts:
        if block.heads is None:
            continue
        count, kv = block.heads.count, block.heads.kv
        for tp in tps:
            counts = {"heads": count} if kv == count else {"heads": count, "kv heads": kv}
            uneven = [f"{n} {what}" for what, n in counts.items() if isinstance(n, int) and n % tp]
            for leaf in block.parameters if uneven else ():
                name = generic(builder.leaves[leaf].name)
                out.setdefault(name, f"{' and '.join(uneven)} do not divide by {tp} ranks")
    return out


def _pins(saved: Mapping[str, list[Parameter]], shapes: Mapping[str, Any], like: Plan) -> dict[str, int | None]:
    """Express the plan as pins: one for all blocks where they agree, otherwise one for every name that both have."""
    dims = {p.name: p.layout.sharded_dim for p in like.parameters}
    keys = sorted(saved, key=len, reverse=True)  # the longest first, for a * also fits what has more parts
    out: dict[str, int | None] = {}
    for key in keys:
        saved_dims = {dims[p.name] for p in saved[key]}
        mine = [n for n in shapes if generic(n) == key]
        if len(saved_dims) == 1 and all(key == next(filter(partial(fnmatch.fnmatchcase, n), keys)) for n in mine):
            out[key] = saved_dims.pop()
        else:
            out = {n: dims[n] for n in mine if n in dims} | out  # before the patterns: the first that fits counts
    return out


def _noted(
    plan: Plan, like: Plan, kept_pins: Mapping[str, Any], free_pins: Mapping[str, str],
    saved: Mapping[str, list[Parameter]], pins: Dims,
) -> Plan:  # fmt: skip
    """Add to a plan the earlier plan's reasons for placements that are kept, and notes of those that are not."""
    names = {generic(k) for k in kept_pins}
    parameters = tuple(
        replace(p, reason=saved[generic(p.name)][0].reason) if p.reason == PINNED and generic(p.name) in names else p
        for p in plan.parameters
    )
    count = sum(generic(p.name) in names for p in parameters)
    note = f"{count} of {len(parameters)} parameters are placed as in the plan for tp={like.tp} that this is like"
    keys_by_reason: dict[str, list[str]] = defaultdict(list)
    for key, reason in free_pins.items():
        keys_by_reason[reason].append(generic(key))
    anew = [f"decided anew: {listed(keys)}: {reason}" for reason, keys in keys_by_reason.items()]
    assert plan.builder is not None
    builder = replace(plan.builder, pins=pins)  # `explain` weighs what the model itself allows
    return replace(plan, parameters=parameters, notes=(*plan.notes, note, *anew), builder=builder)
