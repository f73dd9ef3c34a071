"""`autotp.verify`: a plan proved on one machine, of one call, and of generation with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autotp.cost import Cluster
from autotp.cost.solver.band import BAND
from autotp.driver.options import CaptureRequest, Steering
from autotp.driver.pipeline import required_inputs
from autotp.driver.verify import prove_call
from autotp.passes.shard.pins import Pins
from autotp.plans.plan import Plan
from autotp.proof.report import Report
from autotp.runtime.generation.decoded import decoded
from autotp.runtime.generation.tokens import check_count


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
    band: float = BAND,
    carried: Any = None,
    generate: int | None = None,
    certify: bool = False,
    precision: Any = None,
    cp: int = 1,
) -> Report:
    """Run the plan on `tp` simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error; that the captured graph is the model is
    checked in the model's own dtype. No launcher and no devices are needed. The model and its buffers stay as they are.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate.
        example_inputs: as for `autotp.compile`.
        plan: prove this plan; otherwise one is made.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band: as for `autotp.plan`; not
            together with a plan.
        carried: which outputs come back as which inputs, as for `autotp.compile`.
        generate: also decode so many tokens after the example inputs with a cache, by the model's own `generate()` or
            with what `carried` names, and compare with one forward of all tokens: the logits at every position, and
            the cached tensors, each rank's parts put together (`Report.decoded`). The model is in eval mode for it.
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
    inputs = required_inputs(model, example_inputs, "autotp.verify")
    request = CaptureRequest.read(carried=carried, precision=precision)
    if generate is not None:
        check_count(model, generate, request.carried, cp)
    steering = Steering(pins=pins, cluster=cluster, objective=objective, optimizer=optimizer, memory=memory,
                        sequence_parallel=sequence_parallel, within_node=within_node, band=band)  # fmt: skip
    report, options = prove_call(model, inputs, tp, plan, steering, request, certify, cp)
    if generate is None or report.plan is None or report.difference is not None:
        return report
    return replace(report, decoded=decoded(model, inputs, report.plan, options, request, generate))
