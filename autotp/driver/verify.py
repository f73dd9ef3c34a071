"""Prove on one machine that a plan computes what the original computes, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autotp.capture.selfcheck import Trial
from autotp.cost import Cluster
from autotp.errors import PlanError
from autotp.ir.graph import Capture
from autotp.passes.shard.pins import Pins
from autotp.plans.plan import Plan
from autotp.proof.compare import Difference, Report, compare
from autotp.proof.simulate import Values

from .options import CaptureRequest, Options, Steering
from .pipeline import apply_plan, capture_model, needed, solve_plan

__all__ = ["Difference", "Report", "Values", "compare", "verify"]


def verify(
    model: nn.Module,
    tp: int,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    pins: Pins | None = None,
    cluster: str | Cluster | None = None,
    objective: str = "training",
    optimizer: str = "adamw",
    sequence_parallel: bool | None = None,
    memory: float | str | None = None,
    within_node: bool = False,
    carried: Any = None,
) -> Report:
    """Run the plan on `tp` simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error; that the captured graph is the model is
    checked in the model's own dtype. No launcher and no devices are needed. The model and its buffers stay as they are.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate.
        example_inputs: as for `autotp.compile`.
        plan: prove this plan; otherwise one is made.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node: as for `autotp.plan`; not together
            with a plan.
        carried: which outputs come back as which inputs, as for `autotp.compile`.

    Returns:
        A `Report`, true where everything agrees; it names the first operator that differs, or why the captured graph
        could not be compared with the model, as where that fails on the example inputs.

    Raises:
        InputError, CaptureError, PlanError.
    """
    inputs = needed(model, example_inputs, "autotp.verify")
    if plan is not None and plan.tp != tp:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and tp={tp} are to be simulated. Pass tp={plan.tp}.")
    steering = Steering(pins=pins, cluster=cluster, objective=objective, optimizer=optimizer, memory=memory,
                        sequence_parallel=sequence_parallel, within_node=within_node)  # fmt: skip
    steering.refuse_beside(plan)
    chosen = Options.of_plan(plan) if plan else Options.read(tp, steering)
    request = CaptureRequest.read(1, "full", "counter", carried)
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=True, request=request)
    if plan is None:
        plan = solve_plan(captured, notes, chosen, type(model).__name__)
    planned, sharded = apply_plan(captured, plan, chosen)
    compared = compare(planned, sharded, Values.of(planned.program, model, inputs))
    return replace(compared, plan=plan, capture_error=captured.error, unproved=captured.unproved)


def capture_error(program: Capture, model: nn.Module, values: Values) -> float:
    """Largest relative difference of outputs, buffers and gradients between a captured graph and the model.

    Raises:
        CaptureError: it is more than rounding allows.
    """
    return Trial.of(model, values.inputs, torch.device("cpu")).compare(program)
