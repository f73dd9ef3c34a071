"""From a model, its options and its inputs to what a `ShardedModule` is made from, agreed on by all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from autotp.capture.capture import aliases, skeleton
from autotp.capture.copies import with_histories
from autotp.capture.rank0 import capture_once
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest
from autotp.capture.subclasses.weights import plain_weights
from autotp.comm.ranks import Ranks, agree, broadcast, together, versions
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.precision import DELAYED
from autotp.ir.program import Sharded
from autotp.plans.plan import Plan
from autotp.runtime import state
from autotp.runtime.lower.lower import EAGER, Lowering
from autotp.runtime.programs import Source
from autotp.runtime.samples import few

from .options import Options
from .pipeline import apply_plan, capture_key, capture_model, further, solve_plan
from .schedule import schedule

WEIGHTS = (
    "the weights that the model has (a few values of each are compared; give every rank the same ones, by one seed or "
    "one file, or check=False where they are loaded afterwards)"
)


@dataclass(frozen=True)
class Build:
    """A model that is sharded once its inputs are known: called with them, it gives what a `ShardedModule` takes.

    Attributes:
        ranks: None in one plain process.
        options: what planning is for; of a given plan, what that was made for.
        request: what captures are to be; `lowering`: how programs run.
        plan: None to solve one for the inputs.
        check: compare values between the ranks; `check_capture`: compare the captured graph with the model.
        captured: the model's graph for the inputs and its notes, where they exist already.
    """

    model: nn.Module
    ranks: Ranks | None
    options: Options
    request: CaptureRequest
    lowering: Lowering
    plan: Plan | None = None
    check: bool | None = None
    check_capture: bool | None = None
    captured: tuple[Capture, list[str]] | None = None

    def __post_init__(self) -> None:
        _refuse_delayed(self.request, self.lowering)
        object.__setattr__(self, "model", with_histories(plain_weights(self.model), self.request.precision))

    def __call__(self, inputs: Inputs) -> tuple[nn.Module, Plan, Source]:
        captured, notes = self.captured or self.capture(inputs)
        return self.shard(self.decided(captured, notes, inputs), captured)

    def decided(self, captured: Capture, notes: list[str], inputs: Inputs) -> Plan:
        """The plan, given or solved, once all ranks have the same model."""
        facts = {**versions(), "graph": captured.digest(), **_parameters(self.model, self.check)}
        agree(self.ranks and self.ranks.planners, "the model", facts)
        return self.plan or self._solve(captured, notes)

    def capture(self, inputs: Inputs) -> tuple[Capture, list[str]]:
        """The model's graph for these inputs, the same on every rank, and what the user should know of it."""
        return capture_on_ranks(self.model, inputs, self.ranks, self.check_capture, self.request)

    def shard(self, plan: Plan, captured: Capture | None) -> tuple[nn.Module, Plan, Source]:
        """Return what a `ShardedModule` takes, under this plan; `captured` is then ready to run."""
        model, every = self.model, self.ranks and self.ranks.planners
        together(every, "fitting the plan to the model", lambda: _fits(model, plan))
        digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
        facts = {**versions(), "plan": digest, "wanted": str(self.request), **_parameters(model, None)}
        agree(every, "the plan", facts)
        self.compare_weights()
        options, outputs = self.options, self.request.outputs
        generates = callable(getattr(type(model), "generate", None))  # which reads what it needs

        # Not of `self`: the module lives on with this function, and would keep the original's weights.
        def make(program: Capture, states: Mapping[str, Layout], form: str) -> Sharded:
            late = form == "full" and generates and program.has_states
            return apply_plan(program, plan, options, "deferred" if late else form, states)[1]

        source = Source(
            bare=skeleton(model, _device(self.ranks)),
            make=make,
            capture=further,
            agreed=schedule(ranks=self.ranks).agreed,
            ranks=self.ranks,
            tp=plan.tp,
            aliases=aliases(model),
            want=self.request,
            lowering=self.lowering.priced(self.options.cluster, self.options.objective, schedule().rank),
            check=bool(self.check),
            sample=self.check is not False,
        )
        if captured is not None:
            sharded = together(every, "rewriting the graph", lambda: make(captured, {}, outputs))
            source.ready.append((captured, sharded))
        return model, plan, source

    def compare_weights(self) -> None:
        """Make sure that all ranks have the same weights, by a few values of each, where `check` is left open."""
        if self.check is None:
            agree(self.ranks and self.ranks.planners, WEIGHTS, _few(self.model))

    def _solve(self, captured: Capture, notes: list[str]) -> Plan:
        """Solve the plan on one rank: equally good plans would otherwise differ between ranks."""
        ranks = self.ranks and self.ranks.planners
        solve = partial(solve_plan, captured, notes, self.options, type(self.model).__name__)
        solved = together(ranks, "planning", lambda: solve() if ranks is None or ranks.rank == 0 else None)
        return broadcast(ranks, solved)  # type: ignore[return-value]


def capture_on_ranks(
    model: nn.Module,
    inputs: Inputs,
    ranks: Ranks | None,
    check: bool | None,
    request: CaptureRequest = DEFAULT_CAPTURE,
) -> tuple[Capture, list[str]]:
    """A model's graph for these inputs, the same on every rank, and its notes: rank 0's where all models are equal.

    Args:
        model, inputs, check, request: see `capture_model`. ranks: that take part; None in one plain process.
    """
    ranks, device = ranks and ranks.planners, _device(ranks)
    model = with_histories(plain_weights(model), request.precision)

    def take(captured: Capture, notes: list[str]) -> tuple[Capture, list[str]]:
        captured.origin = skeleton(model, device), without_cache(model, inputs)[0]
        return captured, notes

    of = model, inputs, device, check, request
    return capture_once(
        ranks, schedule(ranks=ranks).agreed, partial(capture_key, *of), partial(capture_model, *of), take
    )


def _refuse_delayed(request: CaptureRequest, lowering: Lowering) -> None:
    """Refuse to compile what writes to a buffer in its backward: torch's compilers would leave that out."""
    precision = request.precision
    if precision is not None and precision.recipe == DELAYED and lowering.backend != EAGER:
        raise InputError(
            f"precision: with delayed scaling a backward leaves the largest values of its gradients to the next call, "
            f"and what backend={lowering.backend!r} compiles would lose them. Use backend='eager', or the recipe "
            "'tensorwise'."
        )


def _fits(model: nn.Module, plan: Plan) -> None:
    have = {n: tuple(p.shape) for n, p in model.named_parameters()}
    want = {p.name: tuple(p.shape) for p in plan.parameters}
    if have != want:
        odd = sorted(set(have.items()) ^ set(want.items()))[:5]
        raise PlanError(
            f"the plan was made for {plan.model} with other parameters than this {type(model).__name__} has, such as "
            f"{', '.join(f'{n} {s}' for n, s in odd)}. Plan again for this model."
        )


def _parameters(model: nn.Module, check: bool | None) -> dict[str, str]:
    """Names, shapes and dtypes; with `check` a hash of the values too."""
    out = {}
    for n, p in model.named_parameters():
        values = state.fingerprint(p) if check and not p.is_meta else ""
        out[f"parameter {n}"] = f"{tuple(p.shape)} {p.dtype} {values}".strip()
    return out


def _few(model: nn.Module) -> dict[str, str]:
    """A few values of every parameter and buffer."""
    return {n: few(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _device(ranks: Ranks | None) -> torch.device:
    return ranks.device if ranks is not None else torch.device("cpu")
