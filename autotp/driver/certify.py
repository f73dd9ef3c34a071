"""`autotp.certify`: a plan's program, checked by a type checker that others wrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autotp.plans.export.annotations import spmd_types
from autotp.plans.plan import Plan
from autotp.proof.certificate.certificate import certificate
from autotp.proof.certificate.report import Certificate

from .options import CaptureRequest, Options
from .pipeline import apply_plan, capture_model, required_inputs


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
