"""What capture tries, in order, where `torch.export` refuses a model as it is.

A change is of the arguments, of the skeleton or of how it is exported; never of the user's model. It is tried only
where the errors so far are of the kind that it is against, and where it changes anything for this model. What a change
assumes of the model is proved on the model itself, where its weights are there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .advice import capture_error, kinds_of, recurs
from .errors import CaptureError
from .exporter import Attempt, forwarding
from .graph import Capture
from .inputs import Inputs
from .selfcheck import Trial

Proof = Callable[[Trial], None]
Missing = dict[str, tuple[str, tuple[int, ...]]]  # a mask -> the input that tells its shape, and by which dimensions


@dataclass(frozen=True)
class Change:
    """One thing to do otherwise.

    Attributes:
        name: for messages.
        against: the kind of error that it helps against, by `advice.kinds_of`; "" for all; "branch" for a decision on a
            value that is there with fixed sizes too.
        apply: makes the change; returns what was done, for the plan's notes, and a proof that the model computes the
            same with it (it raises `CaptureError`), or None where it changes nothing for this model.
    """

    name: str
    against: str
    apply: Callable[[Attempt], tuple[str, Proof | None] | None]


def climb(
    start: Callable[[], Attempt],
    export: Callable[[Attempt], Capture],
    finish: Callable[[Capture], None],
    trial: Trial | None,
) -> Capture:
    """The capture of the first rung of `LADDER` that can be exported and that `finish` does not refuse.

    Raises:
        CaptureError: there is none.
    """
    failures: list[tuple[str, Exception]] = []
    kinds = {""}
    for rung in LADDER:
        if not {change.against for change in rung} <= kinds:
            continue
        try:
            found = _step(start(), rung, export, trial)
        except Exception as error:  # whatever a user's forward and torch's tracer may raise
            kinds |= kinds_of(error) | ({"branch"} if STATIC in rung and recurs(error, failures) else set())
            failures.append((" and ".join(change.name for change in rung), error))
            continue
        if found is None:
            continue
        try:
            finish(found)
        except CaptureError as error:
            failures.append((" and ".join(change.name for change in rung), error))
            continue
        return found
    fails = trial.skip if trial is not None and not trial.skip and trial.original() is None else ""
    raise capture_error(start().bare, failures, fails) from failures[0][1]


def _step(
    attempt: Attempt, rung: tuple[Change, ...], export: Callable[[Attempt], Capture], trial: Trial | None
) -> Capture | None:
    """The capture of one rung; None where one of its changes changes nothing."""
    made = [change.apply(attempt) for change in rung]
    done = [each for each in made if each is not None]
    if len(done) < len(made):
        return None
    proofs = [proof for _, proof in done if proof is not None]
    for proof in proofs:
        if trial is not None and not trial.skip:
            proof(trial)
    found = export(attempt)
    found.notes += [note for note, _ in done]
    if proofs and trial is not None and trial.skip:
        found.notes.append(f"that the model computes the same so was assumed, not proved: {trial.skip}")
    return found


# ---- sizes, and branches on values -----------------------------------------------------------------------------------


def _static(attempt: Attempt) -> tuple[str, None]:
    attempt.symbolic = False
    return "captured for one batch size and length only: the model does not export with symbolic sizes", None


def _draft(attempt: Attempt) -> tuple[str, None]:
    attempt.draft = True
    note = "captured by draft_export: branches on values of the inputs are taken as the example inputs take them, every"
    return f"{note} call is checked, and one that takes another branch is captured by itself", None


# ---- experts ---------------------------------------------------------------------------------------------------------


CAN = "_can_set_experts_implementation"  # how a transformers model says whether it has several


def _experts(wanted: str) -> Change:
    """Mixture-of-experts models of transformers bring several implementations; some loop over the experts that are
    hit, which cannot be exported."""

    def apply(attempt: Attempt) -> tuple[str, None] | None:
        can: list[Any] = [getattr(m, CAN) for m in attempt.bare.modules() if hasattr(m, CAN)]
        if can and not any(ask() for ask in can):
            return None
        configs = {id(c): c for m in attempt.bare.modules() if (c := getattr(m, "config", None)) is not None}
        given = {i: getattr(c, "_experts_implementation", None) for i, c in configs.items()}
        others = [i for i, value in given.items() if value not in (None, wanted)]
        attempt.contexts += [mock.patch.object(configs[i], "_experts_implementation", wanted) for i in others]
        note = f"captured with the experts implementation {wanted!r} in place of {given[others[0]]!r}" if others else ""
        return (note, None) if note else None

    return Change(f"the experts implementation {wanted!r}", "value", apply)


class EveryIndex(TorchFunctionMode):
    """`for i in hit.nonzero()` runs over every index of the flags `hit`, as numbers that can be traced.

    Attributes:
        spared: for every such loop whether it left anything out in the original.
    """

    def __init__(self, tracing: bool) -> None:
        super().__init__()
        self.tracing, self.spared = tracing, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__format__ and args[0].ndim == 0:
            return format(args[0].item(), args[1])  # a name such as f"expert_{i}"
        found = func(*args, **(kwargs or {}))
        flags: Any = args[0] if args else None
        if func in (torch.Tensor.nonzero, torch.nonzero) and isinstance(found, Tensor) and _is_flags(flags):
            if not self.tracing:
                self.spared.append(len(found) < len(flags))  # type: ignore[arg-type]
            return [torch.tensor([i]) for i in range(flags.shape[0])]
        if func is torch.where and self.tracing and len(args) == 1:
            torch._check(found[0].shape[0] >= 1)  # `if not len(rows): continue` has to mean the same as going on
        return found


def _is_flags(value: Any) -> bool:
    flags = isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1
    return flags and isinstance(value.shape[0], int)


def _every_index(attempt: Attempt) -> tuple[str, Proof]:
    attempt.contexts.append(EveryIndex(tracing=True))
    note = "captured with loops over the indices that are hit (such as experts with tokens) running over all indices"
    return note, _prove_every_index


def _prove_every_index(trial: Trial) -> None:
    """The model computes the same, on inputs for which each of its loops leaves something out."""
    for cut in (lambda t: t, lambda t: t[:1], lambda t: t[:1, :1] if t.ndim > 1 else t[:1]):
        inputs = trial.mapped(cut)
        every = EveryIndex(tracing=False)
        try:
            usual, other = trial.outputs(inputs, nullcontext()), trial.outputs(inputs, every)
        except Exception:  # the model does not take such small inputs
            continue
        if every.spared and all(every.spared):
            trial.demand_equal(usual, other, "with loops over all indices, not only those that are hit,")
            return
    raise CaptureError("it could not be shown that a loop may run over all indices, not only those that are hit")


# ---- masks -----------------------------------------------------------------------------------------------------------

# A mask that may be left out, the input that it masks, and which dimensions of that it has.
MASKS = (
    (r"(?P<side>\w+?_)??(attention_)?mask", r"{side}inputs?_\w+", (0, 1)),
    (r"pixel_mask", r"pixel_values", (0, 2, 3)),
)


def _masks(attempt: Attempt) -> tuple[str, Proof] | None:
    own, signature = attempt.bare.forward, inspect.signature(attempt.bare.forward)
    missing = _missing(signature, attempt.args, attempt.kwargs)
    if not missing:
        return None

    def forward(*args: Any, **kwargs: Any) -> Any:
        full = _with_ones(signature, missing, args, kwargs)
        return own(*full.args, **full.kwargs)

    attempt.contexts.append(forwarding(attempt.bare, forward, signature))
    names = ", ".join(missing)
    note = f"captured with masks of ones for {names}: without them torch.export does not take the model's own default"
    return note, lambda trial: _prove_masks(trial, signature, missing)


def _given(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    return signature.bind(*args, **kwargs).arguments | kwargs


def _missing(signature: inspect.Signature, args: Any, kwargs: Any) -> Missing:
    """The masks that were not given."""
    found: Missing = {}
    given = _given(signature, args, kwargs)
    for name, parameter in signature.parameters.items():
        if given.get(name) is not None or parameter.default is not None:
            continue
        for mask, masked, dims in MASKS:
            if match := re.fullmatch(mask, name):
                wanted = masked.format(side=match.groupdict().get("side") or "")
                like = [n for n, v in given.items() if isinstance(v, Tensor) and re.fullmatch(wanted, n)]
                if like and given[like[0]].ndim > max(dims):
                    found[name] = like[0], dims
    return found


def _with_ones(signature: inspect.Signature, missing: Missing, args: Any, kwargs: Any) -> Inputs:
    """The same call with the missing masks."""
    bound, given = signature.bind(*args, **kwargs), _given(signature, args, kwargs)
    for name, (like, dims) in missing.items():
        shape = [given[like].shape[d] for d in dims]
        bound.arguments[name] = torch.ones(shape, dtype=torch.long, device=given[like].device)
    return Inputs(*bound.args, **bound.kwargs)


def _prove_masks(trial: Trial, signature: inspect.Signature, missing: Missing) -> None:
    """The model computes the same with and without the masks, where the inputs hold padding too."""
    inputs = trial.mapped(lambda t: _padded(t, trial.model))
    usual = trial.outputs(inputs, nullcontext())
    other = trial.outputs(_with_ones(signature, missing, inputs.args, inputs.kwargs), nullcontext())
    trial.demand_equal(usual, other, "with masks of ones in place of none")


def _padded(tensor: Tensor, model: nn.Module) -> Tensor:
    """Token ids that end in what a model may take for padding."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    named = [getattr(getattr(model, "config", None), "pad_token_id", None), *(m.padding_idx for m in tables)]
    words = min((m.num_embeddings for m in tables), default=0)
    ids = sorted({i for i in (0, 1, *named) if isinstance(i, int) and 0 <= i < words})
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.ndim != 2 or tensor.shape[1] <= len(ids):
        return tensor
    return torch.cat([tensor[:, : -len(ids)], tensor.new_tensor(ids).expand(len(tensor), -1)], 1) if ids else tensor


STATIC = Change("fixed sizes", "", _static)
DRAFT, DECIDE = Change("draft_export", "branch", _draft), Change("draft_export", "value", _draft)
EVERY = Change("loops over all indices", "loop", _every_index)
ONES = Change("masks of ones", "none", _masks)
GROUPED, BATCHED = _experts("grouped_mm"), _experts("batched_mm")

LADDER: tuple[tuple[Change, ...], ...] = (
    (),
    (GROUPED,),
    (BATCHED,),
    (EVERY,),
    (ONES,),
    (ONES, GROUPED),
    (ONES, BATCHED),
    (ONES, EVERY),
    (STATIC,),
    (DRAFT,),
    (STATIC, DECIDE),
    (STATIC, EVERY),
    (STATIC, ONES),
    (STATIC, ONES, DECIDE),
    (STATIC, ONES, EVERY),
)
