"""A plan made from a saved one: for another depth, degree or width of the same architecture."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    """A plan in which every parameter lies like its equal in another plan, where that is legal and sizes allow it.

    What a saved plan says of a repeated block holds for all blocks: numbers in names are not compared. At another `tp`,
    or where sizes are others, a part is decided anew if its heads do not divide by the ranks, there or here, or if its
    placement is not legal any more. The plan's notes say what that was.

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
        own = [*options.pins.items(), *((k, d) for k, d in pins.items() if k not in options.pins)]
        plan, freed_now = _plan_under(solve, replace(options, pins=dict(own)), pins)
        # At the same degree and sizes what was legal is so still. At others half a head may be legal, and is not meant.
        if plan is not None and not equal:
            odd = _undivided(plan, tp, like.tp)
            freed_now = {k: odd[generic(k)] for k in pins if generic(k) in odd}
        if plan is not None and not freed_now:
            return _noted(plan, like, pins, freed, saved, options.pins)
        freed |= freed_now
        pins = {k: d for k, d in pins.items() if k not in freed_now}


def _equal_shapes(saved: Mapping[str, list[Parameter]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether every parameter has the shape of one that the plan knows under its name without numbers."""
    there = {(name, p.shape) for name, parameters in saved.items() for p in parameters}
    return all((generic(name), shape) in there for name, shape in shapes.items())


def _plan_under(
    solve: Callable[[Options], Plan], options: Options, pins: Mapping[str, Any]
) -> tuple[Plan | None, dict[str, str]]:
    """The plan under these pins, or those of the earlier plan that cannot be kept, and why."""
    try:
        return solve(options), {}
    except PlanError as e:
        reasons = {k: str(e).split(". ")[0] for k in pins if repr(k) in str(e)}
        if not reasons:
            raise
        return None, reasons


def _saved(like: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Parameter]]:
    """The plan's parameters by name without numbers, where they are those of the model."""
    saved: dict[str, list[Parameter]] = defaultdict(list)
    for p in like.parameters:
        saved[generic(p.name)].append(p)
    have = {(generic(n), len(shape)) for n, shape in shapes.items()}
    want = {(key, len(p.shape)) for key, ps in saved.items() for p in ps}
    if have != want:
        odd = [
            f"{name}, which only the {'model' if (name, n) in have else 'plan'} has" for name, n in sorted(have ^ want)
        ]
        raise PlanError(
            f"like= is a plan for {like.model} with other parameters than this model has, such as "
            f"{'; '.join(odd[:3])}. Give a plan for the same architecture (depth, widths and tp may differ), or none."
        )
    return saved


def _undivided(plan: Plan, *tps: int) -> dict[str, str]:
    """Parameters, without numbers, of attentions whose heads do not divide by one of these numbers of ranks."""
    builder, out = plan.builder, {}
    assert builder is not None  # the plan was just made
    for block in builder.parts:
        if block.heads is None:
            continue
        count, kv = block.heads.count, block.heads.kv
        for tp in tps:
            counts = {"heads": count} if kv == count else {"heads": count, "kv heads": kv}
            odd = [f"{n} {what}" for what, n in counts.items() if isinstance(n, int) and n % tp]
            for leaf in block.parameters if odd else ():
                name = generic(builder.leaves[leaf].name)
                out.setdefault(name, f"{' and '.join(odd)} do not divide by {tp} ranks")
    return out


def _pins(saved: Mapping[str, list[Parameter]], shapes: Mapping[str, Any], like: Plan) -> dict[str, int | None]:
    """Say the plan as pins: one for all blocks where they agree, otherwise one for every name that both have."""
    dims = {p.name: p.layout.sharded_dim for p in like.parameters}
    keys = sorted(saved, key=len, reverse=True)  # the longest first, for a * also fits what has more parts
    out: dict[str, int | None] = {}
    for key in keys:
        saved_dims = {dims[p.name] for p in saved[key]}
        mine = [n for n in shapes if generic(n) == key]
        first_keys = set()
        for n in mine:
            first_keys.add(next(k for k in keys if fnmatch.fnmatchcase(n, k)))
        if len(saved_dims) == 1 and first_keys <= {key}:
            out[key] = saved_dims.pop()
        else:
            out = {n: dims[n] for n in mine if n in dims} | out  # before the patterns: the first that fits counts
    return out


def _noted(
    plan: Plan, like: Plan, kept_pins: Mapping[str, Any], free_pins: Mapping[str, str],
    saved: Mapping[str, list[Parameter]], pins: Dims,
) -> Plan:  # fmt: skip
    """The plan with the earlier plan's reasons for what is kept, and notes of what is not."""
    names = {generic(k) for k in kept_pins}
    parameters = tuple(
        replace(p, reason=saved[generic(p.name)][0].reason) if p.reason == PINNED and generic(p.name) in names else p
        for p in plan.parameters
    )
    count = sum(generic(p.name) in names for p in parameters)
    note = f"{count} of {len(parameters)} parameters lie as in the plan for tp={like.tp} that this one is like"
    why: dict[str, list[str]] = defaultdict(list)
    for key, reason in free_pins.items():
        why[reason].append(generic(key))
    anew = [f"decided anew: {listed(keys)}: {reason}" for reason, keys in why.items()]
    assert plan.builder is not None
    builder = replace(plan.builder, pins=pins)  # `explain` weighs what the model itself allows
    return replace(plan, parameters=parameters, notes=(*plan.notes, note, *anew), builder=builder)
