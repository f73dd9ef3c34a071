"""Prove on one machine that a plan computes what the original computes, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autotp.capture.selfcheck import Trial
from autotp.capture.subclasses.weights import plain_weights
from autotp.errors import PlanError
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.plans.export.annotations import spmd_types
from autotp.plans.plan import Plan
from autotp.proof.certificate.certificate import certificate
from autotp.proof.compare import Difference, Report, compare
from autotp.proof.simulate import Values

from .options import CaptureRequest, Options, Steering
from .pipeline import apply_plan, capture_model, solve_plan

__all__ = ["Difference", "Report", "Values", "compare", "prove_call"]


def prove_call(
    model: nn.Module,
    inputs: Inputs,
    tp: int,
    plan: Plan | None,
    steering: Steering,
    request: CaptureRequest,
    certify: bool = False,
) -> tuple[Report, Options]:
    """Prove one call of a model on `tp` simulated ranks: every value and every gradient.

    Args:
        plan: prove this one; None makes one, as `steering` says.
        certify: also ask spmd_types.

    Returns: the report, with the plan, and what that was made for.
    """
    if plan is not None and plan.tp != tp:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and tp={tp} are to be simulated. Pass tp={plan.tp}.")
    steering.refuse_beside(plan)
    model = plain_weights(model)
    if certify:
        spmd_types()  # before minutes of capture
    chosen = Options.of_plan(plan) if plan else Options.read(tp, steering)
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True, request=request)
    if plan is None:
        plan = solve_plan(captured, notes, chosen, type(model).__name__)
    planned, sharded = apply_plan(captured, plan, chosen)
    compared = compare(planned, sharded, Values.of(planned.program, model, inputs))
    certified = certificate(planned, sharded) if certify else None
    proof = replace(compared, plan=plan, capture_error=captured.error, unproved=captured.unproved)
    return replace(proof, certificate=certified), chosen


def capture_error(program: Capture, model: nn.Module, values: Values) -> float:
    """Largest relative difference of outputs, buffers and gradients between a captured graph and the model.

    Raises:
        CaptureError: it is more than rounding allows.
    """
    return Trial.of(model, values.inputs, torch.device("cpu")).compare(program)
