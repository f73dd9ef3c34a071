"""`autotp.verify`: a plan proved on one machine, of one call, forward and backward, and of generation with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.capture.request import CaptureRequest
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, examples_of, over_batch
from autotp.ir.graph import Capture, draws
from autotp.ir.precision import DELAYED
from autotp.ir.program import Planned, Sharded
from autotp.passes.shard.batch_axis import BatchRules
from autotp.passes.shard.deal import DealAxis, Dealt, own_copy
from autotp.passes.shard.sequence_axis import SequenceRules
from autotp.plans.estimates import ALONE, Axes, refuse_travel
from autotp.plans.export.styles import spmd_types
from autotp.plans.plan import Plan
from autotp.proof.bits import same_bits
from autotp.proof.certificate import certificate
from autotp.proof.equality import compare
from autotp.proof.report import Certificate, Difference, Report
from autotp.proof.run import Values
from autotp.text import BESIDE, BITS

from .compile import applied, capture_model, plain, solve_plan
from .decoding import check_count, decoded
from .options import (
    Keywords,
    Options,
    Product,
    VerifyKeywords,
    axes_beside,
    degrees_of,
    read_invariant,
    refuse_beside,
    refuse_undealt,
    refuse_unknown,
    required_inputs,
    with_keywords,
)
from .staging import one_after_another

__all__ = ["Difference", "Report", "Values", "certify", "compare", "prove_call", "verify"]

BITS_ALONE = (
    "tp_invariant and dp_invariant compare calls of their own ranks alone: leave out generate=, certify=, precision=, "
    "shares=, dp=, cp= and pp=."
)


@with_keywords
def verify(
    model: nn.Module,
    tp: Product | DeviceMesh | None = None,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    carried: Any = None,
    generate: int | None = None,
    certify: bool = False,
    precision: Any = None,
    pp: int = 1,
    **keywords: Unpack[VerifyKeywords],
) -> Report:
    """Run the plan on simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error; that the captured graph is the model is
    checked in the model's own dtype. The CPU runs it, wherever the model is, which stays as it is with its buffers.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate, as a product too, or a `DeviceMesh` with dimensions dp, cp and tp, of which the
            degrees are read.
        example_inputs: as for `autotp.compile`; with dp the whole batch, which is sharded here.
        plan: prove this plan, over its axes; otherwise one is made.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band, seconds, shares: as
            for `autotp.plan`; not together with a plan.
        carried: which outputs come back as which inputs, as for `autotp.compile`.
        generate: also decode so many tokens after the example inputs with a cache, by the model's own `generate()` or
            with what `carried` names, and prove each of these calls: every value, the logits and the cached tensors
            (`Report.decoded`). The model is in eval mode for it.
        certify: also have meta-pytorch's spmd_types check the program, as `autotp.certify` does (`Report.certificate`).
        dp, cp, ep: ranks to shard examples, sequences and experts over; only results and gradients are compared.
        pp: cut the program into so many stages, as `autotp.stages` does, and run these one after another.
        precision: as for `autotp.compile`; both sides then compute so, with products of the cast values in float64.
        tp_invariant, dp_invariant: in place of `tp` and `dp`: compare all meshes of divisors of them with the largest.

    Returns:
        A `Report`, true where everything agrees; it names the first operator that differs, or why the captured graph
        could not be compared with the model, as where that fails on the example inputs.

    Raises:
        InputError, CaptureError, PlanError; with `generate` an InputError also where nothing is carried on.
    """
    refuse_unknown("verify", keywords, VerifyKeywords)
    bits = any(keywords.get(name) is not None for name in BITS)
    if (tp is None) != bits:
        raise InputError("give the number of ranks to simulate, tp=4, or tp_invariant=8 for all that divide that.")
    if bits:
        others = {"generate": generate, "certify": certify, "precision": precision, "pp": pp}
        return _bits(model, example_inputs, plan, CaptureRequest.read(carried=carried), keywords, others)
    degree, beside = degrees_of(tp, keywords, model)
    inputs = required_inputs(model, example_inputs, "autotp.verify")
    request = CaptureRequest.read(carried=carried, precision=precision)
    axes = axes_beside(plan, beside, degree)
    if generate is not None:
        check_count(model, generate, request.carried, axes)
    report, options = prove_call(model, inputs, degree, plan, beside, request, certify, axes, pp=pp)
    if generate is None or report.plan is None or report.difference is not None:
        return report
    return replace(report, decoded=decoded(model, inputs, report.plan, options, request, generate))


def _bits(
    model: nn.Module, example_inputs: Any, plan: Plan | None, request: CaptureRequest, keywords: Keywords,
    others: Keywords,
) -> Report:  # fmt: skip
    """Compare numbers of processes with each other; arguments as of `verify`, and `others` that do not go with it."""
    beside = {**keywords, **others}
    if any(beside.get(name) not in (None, False, 1) for name in (*others, "shares", *BESIDE)):
        raise InputError(BITS_ALONE)
    degree = read_invariant(keywords, "tp")
    steering = {name: value for name, value in keywords.items() if name not in BITS}
    axes = axes_beside(plan, keywords, degree or 1)
    inputs = required_inputs(model, example_inputs, "autotp.verify")
    inputs = _whole_batch(inputs, axes.dp) if example_inputs is None else inputs
    return prove_call(model, inputs, degree or 1, plan, steering, request, axes=axes, bits=True)[0]


def _whole_batch(inputs: Inputs, dp: int) -> Inputs:
    """Repeat made-up examples, each time shifted, until `dp` ranks have as many each."""
    tree = inputs.args, dict(inputs.kwargs)
    if examples_of(tree) % dp == 0:
        return inputs
    args, kwargs = over_batch(tree, lambda x: torch.cat([x.roll(place, -1) for place in range(dp)]))
    return Inputs(*args, **kwargs)


def prove_call(
    model: nn.Module,
    inputs: Inputs,
    tp: int,
    plan: Plan | None,
    keywords: Keywords,
    request: CaptureRequest,
    certify: bool = False,
    axes: Axes = ALONE,
    bits: bool = False,
    pp: int = 1,
) -> tuple[Report, Options]:
    """Prove one call of a model on simulated ranks: every value and every gradient, over axes beside tp results alone.

    Args:
        inputs: of the whole batch. plan: prove this one; None makes one. keywords: those that steer that.
        certify: also ask spmd_types.
        axes: beside tp. bits: compare numbers of processes with each other, in place of the original.
        pp: number of stages.

    Returns: the report, with the plan, and the options that it was made for.
    """
    refuse_travel(axes, {"pp": pp if pp > 1 else None, "precision": request.precision})
    if plan is not None and plan.tp != tp:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and tp={tp} are to be simulated. Pass tp={plan.tp}.")
    refuse_beside(plan, keywords)
    refuse_undealt(inputs, axes)
    model = plain(model, request)
    if certify:
        spmd_types()  # before minutes of capture
    if axes.size > 1 and request.carried:
        raise InputError(f"{axes.text} with carried=: no state of a call is sharded over that. Leave out one.")
    precision = request.precision
    if axes.dp > 1 == axes.cp and precision is not None and precision.recipe != DELAYED:
        raise InputError(
            f"with dp products in float8 are scaled by the largest values of a rank's slice, which no one device has: "
            f"prove the recipe {precision.recipe!r} with dp=1, or with cp."
        )
    options = Options.of_plan(plan) if plan else Options.read(tp, keywords, axes)
    captured, beside, planned, sharded, plan = programs_on(model, inputs, options, request, plan, pp)
    # By torch's generator every rank beside tp draws for itself, and others than one device.
    if beside and any(draws(n) for n in captured.graph.nodes):
        raise InputError(
            f"the model draws random numbers, which every rank of {axes.name} does for itself: prove it in eval()."
        )
    values = Values.of(captured, model, inputs)
    compared = (same_bits if bits else compare)(planned, sharded, values, captured, beside)
    certified = certificate(planned, sharded, axes.degrees) if certify else None
    proof = replace(compared, plan=plan, capture_error=captured.error, unproved=captured.unproved)
    return replace(proof, certificate=certified, beside={**({"pp": pp} if pp > 1 else {}), **proof.beside}), options


def programs_on(
    model: nn.Module, inputs: Inputs, options: Options, request: CaptureRequest, plan: Plan | None = None, pp: int = 1
) -> tuple[Capture, Sequence[Dealt], Planned, Sharded, Plan]:
    """Capture a model, shard its program over the axes beside tp, and plan the program of a rank of these.

    Args:
        model, inputs: of a call with all examples and whole sequences. options: with the axes. request: of
            captures. plan: by this one; None makes one. pp: number of stages, one after another.
    """
    degrees = options.batch.degrees
    request = replace(request, random="torch") if "dp" in degrees else request
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True, request=request)
    program, beside = own_copy(captured) if degrees else captured, []
    for policy in (BatchRules, SequenceRules):
        if ranks := degrees.get(policy.axis):
            beside.append(DealAxis(policy, ranks, options.tp, options.cluster, options.batch.ep).deal(program))
    if plan is None:
        for axis in beside:
            notes += axis.notes
        plan = solve_plan(program, notes, options, type(model).__name__)
    planned, sharded, builder = applied(program, plan, options)
    return captured, beside, planned, one_after_another(planned, sharded, builder, plan.model, pp), plan


def certify(
    model: nn.Module, plan: Plan, example_inputs: Any = None, *, carried: Any = None, precision: Any = None, pp: int = 1
) -> Certificate:
    """Have meta-pytorch's spmd_types check the program that a plan makes of a model, on meta tensors.

    The types of leaves, of pending sums and of outputs are the plan's; every other type is inferred from them by the
    checker, so that a conversion which is missing, done twice or another one is refused. Nothing is computed, and the
    weights are not read. `autotp.verify(..., certify=True)` does it beside the comparison of numbers. With dp or cp it
    is the program of one of their ranks, over tp: what goes over them is taken as it is, and proved by `verify` alone.

    Args:
        model: with its weights, or on the meta device.
        plan: of this model.
        example_inputs, carried, precision: as for `autotp.compile`. pp: as for `autotp.verify`.

    Returns:
        A `Certificate`, true where nothing is refused; it names the first operator that is.

    Raises:
        InputError: the inputs do not fit, or spmd_types is not installed (`pip install 'autotp[certify]'`).
        CaptureError, PlanError.
    """
    spmd_types()  # before minutes of capture
    axes, options = plan.batch, Options.of_plan(plan)
    inputs = required_inputs(model, example_inputs, "autotp.certify", axes)
    request = CaptureRequest.read(axes, carried=carried, precision=precision).within(options.tp, options.cluster)
    captured, _ = capture_model(model, inputs, torch.device("cpu"), check=False, request=request)
    planned, sharded, builder = applied(captured, plan, options)
    return certificate(planned, one_after_another(planned, sharded, builder, plan.model, pp), axes.degrees)
