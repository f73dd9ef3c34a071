"""`autotp.verify`: a plan proved on one machine, of one call, forward and backward, and of generation with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from autotp.capture.request import CaptureRequest
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs
from autotp.ir.graph import draws
from autotp.ir.program import Planned, Sharded
from autotp.passes.shard.deal import DealAxis, Dealt, own_copy
from autotp.passes.shard.sequence_axis import SequenceRules
from autotp.plans.export.styles import spmd_types
from autotp.plans.plan import Plan
from autotp.proof.certificate import certificate
from autotp.proof.equality import Sequences, compare
from autotp.proof.report import Certificate, Difference, Report
from autotp.proof.run import Values

from .compile import apply_plan, capture_model, plain, solve_plan
from .decoding import check_count, decoded
from .options import Options, Steering, read_axis, refuse_beside, refuse_unknown, required_inputs, with_keywords

__all__ = ["Difference", "Report", "Values", "certify", "compare", "prove_call", "verify"]


@with_keywords
def verify(
    model: nn.Module,
    tp: int,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    carried: Any = None,
    generate: int | None = None,
    certify: bool = False,
    precision: Any = None,
    cp: int = 1,
    **keywords: Unpack[Steering],
) -> Report:
    """Run the plan on `tp` simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error; that the captured graph is the model is
    checked in the model's own dtype. No launcher and no devices are needed. The model and its buffers stay as they are.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate.
        example_inputs: as for `autotp.compile`.
        plan: prove this plan; otherwise one is made.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band, seconds: as for
            `autotp.plan`; not together with a plan.
        carried: which outputs come back as which inputs, as for `autotp.compile`.
        generate: also decode so many tokens after the example inputs with a cache, by the model's own `generate()` or
            with what `carried` names, and prove each of these calls: every value, the logits and the cached tensors
            (`Report.decoded`). The model is in eval mode for it.
        certify: also have meta-pytorch's spmd_types check the ranks' program, as `autotp.certify` does
            (`Report.certificate`).
        cp: ranks of a second axis, simulated too, to which these whole sequences are dealt; results are compared.
        precision: as for `autotp.compile`; both sides then compute so, with products of the cast values in float64.

    Returns:
        A `Report`, true where everything agrees; it names the first operator that differs, or why the captured graph
        could not be compared with the model, as where that fails on the example inputs.

    Raises:
        InputError, CaptureError, PlanError. With `generate` an InputError also where nothing is carried from call to
            call.
    """
    refuse_unknown("verify", keywords, Steering)
    inputs = required_inputs(model, example_inputs, "autotp.verify")
    request = CaptureRequest.read(carried=carried, precision=precision)
    if generate is not None:
        check_count(model, generate, request.carried, cp)
    report, options = prove_call(model, inputs, tp, plan, keywords, request, certify, cp)
    if generate is None or report.plan is None or report.difference is not None:
        return report
    return replace(report, decoded=decoded(model, inputs, report.plan, options, request, generate))


def prove_call(
    model: nn.Module,
    inputs: Inputs,
    tp: int,
    plan: Plan | None,
    keywords: Mapping[str, Any],
    request: CaptureRequest,
    certify: bool = False,
    cp: int = 1,
) -> tuple[Report, Options]:
    """Prove one call of a model on `tp` simulated ranks: every value and every gradient.

    Args:
        plan: prove this one; None makes one. keywords: those that steer that.
        certify: also ask spmd_types.
        cp: ranks of an axis of sequences beside tp; with more than one results and their gradients are compared.

    Returns: the report, with the plan, and what that was made for.
    """
    if plan is not None and plan.tp != tp:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and tp={tp} are to be simulated. Pass tp={plan.tp}.")
    refuse_beside(plan, keywords)
    model = plain(model, request)
    if certify:
        spmd_types()  # before minutes of capture
    axis = plan.batch if plan is not None and plan.batch.cp > 1 else read_axis(1, False, tp, cp)
    if axis.size > 1:
        return _over_sequences(model, inputs, plan, Options.read(tp, keywords, axis), request, certify)
    options = Options.of_plan(plan) if plan else Options.read(tp, keywords)
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True, request=request)
    if plan is None:
        plan = solve_plan(captured, notes, options, type(model).__name__)
    planned, sharded = apply_plan(captured, plan, options)
    compared = compare(planned, sharded, Values.of(planned.program, model, inputs))
    certified = certificate(planned, sharded) if certify else None
    proof = replace(compared, plan=plan, capture_error=captured.error, unproved=captured.unproved)
    return replace(proof, certificate=certified), options


def _over_sequences(
    model: nn.Module, inputs: Inputs, plan: Plan | None, options: Options, request: CaptureRequest, certify: bool
) -> tuple[Report, Options]:
    """Prove one call on simulated ranks of a mesh (cp, tp), of whole sequences that are dealt to them."""
    if plan is not None or certify or request.carried:
        raise InputError("with cp a plan is made and proved by values: leave out plan=, certify= and carried=.")
    axis, planned, sharded, plan = program_of_sequences(model, inputs, options, request)
    # Every cp rank draws for itself, and others than one device.
    if any(draws(n) for n in axis.whole.graph.nodes):
        raise InputError("the model draws random numbers, which every cp rank does for itself: prove it in eval().")
    compared = compare(planned, sharded, Values.of(axis.whole, model, inputs), axis)
    captured = axis.whole
    return replace(compared, plan=plan, capture_error=captured.error, unproved=captured.unproved), options


def program_of_sequences(
    model: nn.Module, inputs: Inputs, options: Options, request: CaptureRequest
) -> tuple[Sequences, Planned, Sharded, Plan]:
    """Return the program of a rank of a mesh (cp, tp), the axis that it is of, and its plan.

    Args:
        model, inputs: of a call with whole sequences. options: with the axis of cp. request: what captures are to be.
    """
    request = replace(request, random="torch")
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True, request=request)
    program, cp = own_copy(captured), options.batch.cp
    axis = DealAxis(SequenceRules, cp, options.tp, options.cluster)
    dealt = axis.deal(program) if cp > 1 else Dealt({}, (), [])
    plan = solve_plan(program, [*notes, *dealt.notes], options, type(model).__name__)
    return Sequences(captured, cp, dealt.inputs, dealt.outputs), *apply_plan(program, plan, options), plan


def certify(
    model: nn.Module, plan: Plan, example_inputs: Any = None, *, carried: Any = None, precision: Any = None
) -> Certificate:
    """Have meta-pytorch's spmd_types check the program that a plan makes of a model, on meta tensors.

    The types of leaves, of pending sums and of outputs are the plan's; every other type is inferred from them by the
    checker, so that a conversion which is missing, done twice or another one is refused. Nothing is computed, and the
    weights are not read. `autotp.verify(..., certify=True)` does it beside the comparison of numbers.

    Args:
        model: with its weights, or on the meta device.
        plan: of this model.
        example_inputs, carried, precision: as for `autotp.compile`.

    Returns:
        A `Certificate`, true where nothing is refused; it names the first operator that is.

    Raises:
        InputError: the inputs do not fit, or spmd_types is not installed (`pip install 'autotp[certify]'`).
        CaptureError, PlanError.
    """
    spmd_types()  # before minutes of capture
    inputs = required_inputs(model, example_inputs, "autotp.certify")
    request = CaptureRequest.read(carried=carried, precision=precision)
    captured, _ = capture_model(model, inputs, torch.device("cpu"), check=False, request=request)
    return certificate(*apply_plan(captured, plan, Options.of_plan(plan)))
