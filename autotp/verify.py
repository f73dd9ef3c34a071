"""Prove on one machine that a plan computes what the original computes, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp.cost import Cluster

from . import compat
from .compare import Difference, Report, compare
from .errors import InputError, PlanError
from .graph import Capture
from .numerics import loss, relative
from .pipeline import Options, Pins, apply_plan, capture_model, example, solve_plan
from .plan import Plan
from .simulate import Values, reference

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
    sequence_parallel: bool | None = None,
) -> Report:
    """Run the plan on `tp` simulated ranks in this process and compare every value and gradient with the original.

    Both sides run in float64, so that rounding does not hide a small error; that the captured graph is the model is
    checked in the model's own dtype. No launcher and no devices are needed. The model and its buffers stay as they are.

    Args:
        model: the model, with real weights, or on the meta device (then with random ones).
        tp: number of ranks to simulate.
        example_inputs: as for `autotp.compile`.
        plan: prove this plan; otherwise one is made.
        pins, cluster, objective, sequence_parallel: as for `autotp.plan`; for a plan that is given they have no use.

    Returns:
        A `Report`, true where everything agrees; it names the first operator that differs.

    Raises:
        InputError, CaptureError, PlanError.
    """
    inputs = example(model, example_inputs)
    if inputs is None:
        raise InputError(
            f"autotp.verify needs example_inputs for {type(model).__name__}: only transformers models get theirs from "
            "the config. Pass a tensor, a tuple of arguments, a mapping of keyword arguments, or autotp.Inputs(...)."
        )
    if plan is not None and plan.tp != tp:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and tp={tp} are to be simulated. Pass tp={plan.tp}.")
    chosen = Options.of_plan(plan) if plan else Options.read(tp, pins, cluster, objective, sequence_parallel)
    captured, notes = capture_model(model, inputs, torch.device("cpu"))
    if plan is None:
        plan = solve_plan(captured, notes, chosen, type(model).__name__)
    planned, sharded = apply_plan(captured, plan, chosen)
    values = Values.of(captured, model, inputs)
    error = capture_error(captured, model, values)
    report = replace(compare(planned, sharded, values), plan=plan, capture_error=error)
    allowed = capture_tolerance(model)
    if error > allowed and report.ok:
        detail = f"the captured graph is off by {error:.1e} (rounding allows {allowed:.1e}): it is not deterministic?"
        return replace(report, difference=Difference("capture", "output", "the graph", "", error, detail))
    return report


def capture_tolerance(model: nn.Module) -> float:
    """What rounding may make of the difference between the captured graph and the model, in its least exact dtype."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((1e4 * torch.finfo(d).eps if d.itemsize > 2 else 16 * torch.finfo(d).eps for d in kinds), default=1e-3)


def capture_error(program: Capture, model: nn.Module, values: Values) -> float:
    """Largest relative difference of outputs and parameter gradients between the captured graph and the model."""
    if any(p.is_meta for p in model.parameters()):
        return float("nan")
    state = torch.random.get_rng_state()
    its, mine = _parameters(model), _parameters(model)
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    args, kwargs = compat.tree_map(_copy, (values.inputs.args, dict(values.inputs.kwargs)))
    own = torch.func.functional_call(model, (its, buffers), args, kwargs)
    torch.random.set_rng_state(state)
    given = {n: _copy(v) for n, v in values.given.items()}
    given |= {x.node: mine[program.aliases.get(x.name, x.name)] for x in program.leaves if x.kind == "parameter"}
    found = compat.tree_leaves(reference(program.graph, given, lambda n, v: None))
    kept = [v for i, v in enumerate(found) if i not in program.mutations]
    both = zip(kept, compat.tree_leaves(own), strict=True)
    pairs = [(a, b) for a, b in both if isinstance(a, Tensor) and isinstance(b, Tensor)]
    ours, theirs = _gradients([a for a, _ in pairs], mine), _gradients([b for _, b in pairs], its)
    scale = max((g.abs().max().item() for g in theirs.values() if g.numel()), default=0.0)
    errors = [relative(a.detach(), b.detach()) for a, b in pairs]
    return max([*errors, *(relative(ours[n], theirs[n], scale) for n in theirs)], default=0.0)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}


def _gradients(outputs: list[Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    total = loss(outputs)
    if total.requires_grad:
        total.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
