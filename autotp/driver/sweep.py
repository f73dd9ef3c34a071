"""Plans of one model for several degrees: time, memory, bytes, communication, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from autotp.capture.request import CaptureRequest
from autotp.cost.memory import lifetimes
from autotp.cost.prices import lengths
from autotp.errors import InputError, PlanError
from autotp.ir.graph import Capture, shape_of, size_hint
from autotp.log import stage, uncollected
from autotp.plans.choices import Sweep
from autotp.plans.estimates import Degree
from autotp.plans.plan import Plan

from .compile import capture_model, plan_stages
from .options import (
    Options,
    Product,
    SweepKeywords,
    axes_beside,
    degrees_of,
    refuse_unknown,
    required_inputs,
    with_keywords,
)  # fmt: skip
from .shares import Staged

DEGREES = (1, 2, 4, 8, 16, 32)


@with_keywords
def sweep(
    model: nn.Module,
    tps: int | Iterable[Product] = DEGREES,
    *,
    example_inputs: Any = None,
    check_capture: bool | None = None,
    precision: Any = None,
    **keywords: Unpack[SweepKeywords],
) -> Sweep:
    """Plan a model for several degrees, captured once. Needs no devices, weights or process group.

    Args:
        model, example_inputs, cluster, objective, optimizer, sequence_parallel, pins, band, seconds, within_node,
            shares, check_capture, precision, dp, ep, imbalance: see `autotp.plan`; ep is a number.
        tps: the degrees, each as `tp` of `autotp.plan`.
        memory: what a rank may hold, in bytes or as "80GB"; default: the memory of the cluster's device.

    Returns:
        The `Sweep`, with the plan of every degree; with a `precision` the figures in the model's own beside it
        (`Sweep.baseline`).

    Raises:
        InputError, CaptureError, PlanError.
    """
    refuse_unknown("sweep", keywords, SweepKeywords)
    degrees = [tps] if isinstance(tps, int) else list(tps)
    if not degrees:
        raise InputError("tps is empty: give the degrees to plan for, such as tps=[1, 2, 4, 8].")
    axes = axes_beside(None, {**keywords, "precision": precision}, 1)
    options = [Options.read(*degrees_of(tp, keywords, model), axes) for tp in degrees]
    if len({x.tp for x in options}) < len(options):
        raise InputError(f"tps={degrees} gives one number of ranks twice: leave one out.")
    inputs, name = required_inputs(model, example_inputs, "autotp.sweep"), type(model).__name__
    request = CaptureRequest.read(axes, precision=precision)

    def swept(request: CaptureRequest) -> Sweep:
        captured, notes = capture_model(model, inputs, torch.device("cpu"), check_capture, request)
        return sweep_captured(captured, notes, options, name)

    plain = swept(replace(request, precision=None))
    if request.precision is None:
        return plain
    return replace(swept(request), precision=f"float8 {request.precision.recipe}", baseline=plain)


@uncollected()
def sweep_captured(
    captured: Capture, notes: list[str], options: Sequence[Options], name: str, every: bool = True
) -> Sweep:
    """Plan a captured model for several degrees.

    Args:
        captured: it stays as it is. notes: of the capture, for every plan. name: the model's.
        options: one for each degree, which differ in nothing else.
        every: plan for all degrees; without, for those alone that may be the best, the last of them at least.
    """
    first = options[0]
    limit = first.cluster.memory_size if first.memory is None else first.memory
    rows, plans, roomy, least = [], {}, [], 0.0 if every else _least(captured, first)
    for i, option in enumerate(options, 1):
        tp = option.tp
        if least > limit * tp and i < len(options):
            continue
        # Ranks that are joined compute and send at most what each did, so a multiple of a degree whose fastest plan
        # fits has no more throughput per device.
        if not every and any(tp % other == 0 for other in roomy):
            continue
        with stage(f"tp={tp}, {i} of {len(options)}"):
            staged, row = _degree(captured, notes, option, name, limit)
        rows.append(row)
        plans[tp] = staged.plan
        if row.fits and staged.builder.memory is None:
            roomy.append(tp)
    return Sweep(
        model=name,
        cluster=first.cluster.name,
        objective=first.objective.name,
        optimizer=first.objective.optimizer,
        batch=_batch(captured)[1],
        axes=first.batch.text,
        limit=limit,
        rows=tuple(rows),
        plans=plans,
    )


def _least(captured: Capture, options: Options) -> float:
    """Sum the bytes of weights, gradients and optimizer states, which ranks hold at least once."""
    weights = [x.node.meta["val"] for x in captured.leaves if x.kind.trained]
    return sum(options.objective.budget_bytes(x.nbytes, x) for x in weights)


def _degree(captured: Capture, notes: list[str], options: Options, name: str, limit: float) -> tuple[Staged, Degree]:
    """Make the fastest plan, or where that does not fit and one that fits exists, the fastest of those."""
    staged = plan_stages(captured, notes, replace(options, memory=None), name)
    choice = staged.plan.share_choice
    limit = limit if choice is None else choice.limits[0]
    if choice is None and staged.plan.memory.peak > limit >= staged.problem[0].leanest:
        try:
            leaner = plan_stages(captured, notes, replace(options, memory=limit), name, staged)
        except PlanError:  # nothing fits
            leaner = staged
        staged = leaner if leaner.plan.memory.peak <= limit else staged
    plan, (work, unit) = staged.plan, _work(captured, options)
    seconds = plan.totals.seconds
    return staged, Degree(
        tp=plan.tp,
        seconds=seconds,
        exposed=plan.totals.exposed,
        sent=plan.totals.sent,
        memory=plan.memory.peak,
        fits=not choice.full if choice is not None else plan.memory.peak <= limit,
        throughput=work / seconds / plan.tp if seconds else 0.0,
        unit=unit,
        largest_batch=largest_batch(staged, limit),
    )


def _batch(captured: Capture) -> tuple[list[Any], int]:
    """Return the symbols of the inputs' first dimension, and the first one's size in the example inputs."""
    firsts = [s for leaf in captured.inputs for s in shape_of(leaf.node)[:1]]
    symbols = [s for s in dict.fromkeys(firsts) if not isinstance(s, int)]
    return symbols, size_hint(firsts[0], captured.hints) if firsts else 1


def _work(captured: Capture, options: Options) -> tuple[float, str]:
    """Return the work of a step, and its unit: tokens where the inputs have lengths, otherwise samples."""
    batch, symbols = _batch(captured)[1], lengths(captured)
    if not symbols:
        return float(batch), "samples"
    if options.objective.name == "decode":
        return float(batch), "tokens"
    first = next(s for leaf in captured.inputs for s in shape_of(leaf.node)[1:2] if s in symbols)
    return float(batch * size_hint(first, captured.hints)), "tokens"


def largest_batch(staged: Staged, limit: float) -> int | None:
    """Find the largest batch that fits into `limit` bytes under this plan; None where the batch size is fixed.

    The peak is piecewise linear in the batch, so following the line through the last two points soon meets the limit.
    """
    symbols, size = _batch(staged.planned.program)
    # A model that was captured for one batch size has no line to follow.
    if not symbols:
        return None
    m, objective, hints = staged.plan.memory, staged.builder.objective, staged.builder.prices.hints
    # A peak walks over all lifetimes, and the bounds below ask for the same batches again.
    moving = lifetimes(staged.planned, staged.sharded, objective)
    peaks: dict[int, float] = {}

    def peak(batch: int) -> float:
        if batch not in peaks:
            sizes = {**hints, **dict.fromkeys(symbols, batch)}
            peaks[batch] = m.steady - m.cache + m.cache * (batch / size) + moving(sizes)[1]
        return peaks[batch]

    low, high = 0, size  # fits (0: assumed), does not fit
    while peak(high) <= limit:
        low, high = high, 2 * high + math.floor((limit - peak(high)) * size / max(peak(high) - m.steady, 1.0))
        # A batch that adds nothing to the peak never exceeds the limit.
        if high > 2**31:
            return low
    while high - low > 1:
        before = peak(low) if low else m.steady
        slope = (peak(high) - before) / (high - low)
        # A batch may add nothing to the peak, where another moment is fuller: there is no line then, so halve.
        guess = low + math.floor((limit - before) / slope) if slope > 0 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if peak(guess) <= limit else (low, guess)
        if low and peak(low + 1) > limit:
            return low
    return low


def automatic(captured: Capture, notes: list[str], tps: Iterable[int], keywords: Mapping[str, Any], name: str) -> Plan:
    """Make the plan of the best of these degrees."""
    first = Options.read(1, keywords)
    inside = [tp for tp in tps if not (keywords.get("within_node") and first.cluster.spans_nodes(tp))]
    options = [replace(first, tp=tp) for tp in inside]
    return sweep_captured(captured, notes, options, name, every=bool(first.cluster.ranks)).chosen()
