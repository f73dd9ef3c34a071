"""A prompt and tokens after it, decoded with a cache on simulated ranks, against one forward of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp.capture.request import CaptureRequest
from autotp.capture.selfcheck import Trial
from autotp.errors import AutoTPError, InputError
from autotp.inputs import Inputs
from autotp.ir.graph import short_name, tensors
from autotp.ir.scopes import module_path
from autotp.plans.plan import Plan
from autotp.proof.differences import relative, rounding_of
from autotp.proof.report import TOLERANCE, Decoded, Difference
from autotp.proof.run import StepError

from .decoded_calls import Generated, NamedCalls, calls_of
from .options import Options
from .simulated import CPU, DecodedModel, State, Step

FAILS = (
    "autotp.verify(generate={count}): the model itself fails {what}: {error}. Give shorter example inputs, or others."
)
FORWARD = "decoding against the forward"  # a difference that the unsharded programs have too


def decoded(
    model: nn.Module, inputs: Inputs, plan: Plan, options: Options, request: CaptureRequest, count: int
) -> Decoded:
    """Generate on simulated ranks, with given tokens, and compare with one forward of all tokens.

    Args:
        inputs: the prompt. plan: made with these `options`. request: says which states a user named.
        count: of tokens after the prompt.

    Raises:
        InputError: nothing comes back from call to call, or the model itself fails.
        CaptureError, PlanError: a call cannot be captured, or not run under the plan.
    """
    trial = Trial.of(model, inputs, CPU)
    copied = trial.copied.eval()
    simulated = DecodedModel(copied, plan, options, request, lambda outputs: calls.rows(outputs))
    calls = calls_of(model, simulated.bare, trial.mapped(), count, request.carried)
    own, own_forward = _own(copied, calls, count)
    try:
        calls.decode(simulated.call)
        steps = simulated.restart(ranks=False)
    except StepError as e:
        return _failed(e, calls, count)
    calls.forward(simulated.call)
    comparison = compared(steps, simulated.restart(ranks=False)[0], calls.token_positions(), calls.total - count)
    positions, tolerance = calls.token_positions(), max(trial.tolerance(), _rounding(simulated))
    gap = _rows_error(_joined(own), _joined([step.outputs for step in steps]), positions)
    alone = _rows_error(_joined(own), own_forward, positions)
    difference = explained(comparison.difference, gap, alone, tolerance)
    return Decoded(**{**vars(comparison), "model_error": gap, "difference": difference})


def explained(difference: Difference | None, gap: float, alone: float, tolerance: float) -> Difference | None:
    """A difference with what the model's own generation says of it, or the one from that.

    Args:
        difference: of the ranks. gap: of the captured programs' logits from the model's own generation.
        alone: of that from the model's own forward of all tokens. tolerance: what rounding may make of these two.
    """
    if difference is not None and difference.direction != FORWARD:
        return difference
    if not gap <= tolerance:
        what = f"the logits of the captured programs are off by {gap:.1e} from those of the model's own generation"
        return _difference("logits", gap, what, "capture")
    if difference is None:
        return None
    if alone <= tolerance:
        why = f"the model's own logits, decoded and of one forward, are within {alone:.1e} of each other in its dtype"
    else:
        why = f"so is the model itself, whose decoding is off by {alone:.1e} from its forward"
    same = f"the ranks compute what its decoding does, within {gap:.1e}"
    return replace(difference, detail=f"{difference.detail}; {why}: {same}")


def _rounding(simulated: DecodedModel) -> float:
    """Return what the model's own casts may cost it, such as of angles to float32: here all is computed in float64."""
    nodes = itertools.chain.from_iterable(p.capture.graph.nodes for p in simulated.programs)
    values = itertools.chain.from_iterable(map(tensors, nodes))
    return rounding_of({v.dtype for v in values if v.dtype.is_floating_point})


def _own(model: nn.Module, calls: Generated | NamedCalls, count: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Run the model itself, in its own dtype: each call of its decoding, and all tokens at once."""
    rows: list[list[Tensor]] = []

    def call(entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = model.get_submodule(entry)(*args, **kwargs)
        rows.extend([calls.rows(outputs)] if not entry else [])
        return outputs

    for run, what in ((calls.decode, f"while it decodes {count} tokens"), (calls.forward, "on all tokens at once")):
        try:
            with torch.no_grad():
                run(call)
        except AutoTPError:
            raise
        except Exception as error:  # whatever a user's forward may raise
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise InputError(FAILS.format(count=count, what=what, error=text)) from error
    return rows[:-1], rows[-1]


def compared(steps: Sequence[Step], forward: Step, unpadded: Tensor | None, prompt: int) -> Decoded:
    """Hold the calls of the ranks against those of the unsharded programs, and these against one forward of all tokens.

    Args:
        steps: the prompt's call, and one for each token. forward: of all tokens.
        unpadded: which positions are no padding; None where all are. prompt: how many positions come before the tokens.
    """
    whole, last = _joined([s.outputs for s in steps]), steps[-1].states
    caches = {name: _cache_error(state.whole, forward.states.get(name), unpadded) for name, state in last.items()}
    # What the ranks have is at most as far from the forward as both errors together.
    logits = _rows_error(whole, forward.outputs, unpadded) + max(s.logits_error for s in steps)
    cache = max(caches.values(), default=0.0) + max(s.cache_error for s in steps)
    positions = max((min(a.shape[1], b.shape[1]) for a, b in zip(whole, forward.outputs, strict=False)), default=0)
    first = next((_on_ranks(k, step, prompt) for k, step in enumerate(steps) if step.gap is not None), None)
    if first is None and not max(logits, cache) <= TOLERANCE:
        name, error = max(caches.items(), key=lambda x: x[1]) if cache > logits else ("the logits", logits)
        first = _difference(name, error, f"off by {error:.2e} from one forward of all tokens, unsharded too", FORWARD)
    return Decoded(prompt, len(steps) - 1, positions, len(last), logits, cache, 0.0, first)


def _on_ranks(k: int, step: Step, prompt: int) -> Difference:
    """Name the first value of a call that is another on the ranks than in the unsharded program."""
    assert step.gap is not None
    call = "the prompt" if k == 0 else f"decoded token {k}, at position {prompt + k - 1}"
    key, error = step.gap.key, step.gap.error
    if not isinstance(key, str):
        return _difference("the logits", error, f"those of {call} are off by {error:.2e} on rank {key[0]}")
    state = step.states[key]
    where, value = "", (state.parts.joined() or [None])[0]
    if value is not None and value.shape == state.whole.shape and value.numel():
        at = torch.unravel_index((value - state.whole).abs().flatten().argmax(), value.shape)
        where = f", most at {[int(i) for i in at]}"
    return _difference(key, error, f"after {call} the ranks' parts are off by {error:.2e}{where}")


def _joined(calls: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Outputs of several calls as those of one: along their positions, which are dimension 1."""
    out = []
    for each in zip(*calls, strict=False):
        if all(x.ndim > 1 for x in each):
            out.append(torch.cat(list(each), 1))
    return out


def _rows_error(rows_of_ranks: Sequence[Tensor], expected: Sequence[Tensor], positions: Tensor | None) -> float:
    """Return how far the last positions of outputs are off, those of padding aside; inf where there are none."""
    errors = []
    for a, b in zip(rows_of_ranks, expected, strict=False):
        rows = min(a.shape[1], b.shape[1])
        a, b = a[:, -rows:].double(), b[:, -rows:].double()
        where = None if positions is None or positions.shape[1] < rows else positions[:, -rows:]
        errors.append(relative(a, b) if where is None else relative(a[where], b[where]))
    return max(errors, default=float("inf"))


def _cache_error(value: Tensor, state: State | None, positions: Tensor | None) -> float:
    """Return how far a cached tensor is off, at positions that are no padding."""
    if state is None:
        return float("inf")
    whole = state.whole
    if positions is not None and value.shape == whole.shape and positions.shape[0] == whole.shape[0]:
        for d in (d for d in range(1, whole.ndim) if whole.shape[d] == positions.shape[1]):
            sizes = [1] * whole.ndim
            sizes[0], sizes[d] = whole.shape[0], whole.shape[d]
            mask = positions.view(sizes)
            return relative(value * mask, whole * mask)
    return relative(value, whole)


def _failed(error: StepError, calls: Generated | NamedCalls, count: int) -> Decoded:
    path = module_path(error.node)
    what, detail = short_name(error.node.target), f"it fails on a rank: {str(error).splitlines()[0]}"
    difference = Difference("decoding", error.node.name, what, path[-1] if path else "", float("inf"), detail)
    return Decoded(calls.total - count, count, 0, 0, float("inf"), float("inf"), float("inf"), difference)


def _difference(value: str, error: float, detail: str, direction: str = "decoding") -> Difference:
    return Difference(direction, value, "", "", error, detail)
