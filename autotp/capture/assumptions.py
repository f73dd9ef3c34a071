"""Changes of a capture that rest on an assumption, each with its proof on the model itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp.errors import CaptureError
from autotp.inputs import Inputs

from .capture_errors import running_line
from .export import Attempt, forwarding
from .selfcheck import Trial

# Raises CaptureError; returns a trial on the inputs of the proof, for the capture itself
AssumptionProof = Callable[[Trial], Trial]
Missing = dict[str, tuple[str, tuple[int, ...]]]  # a mask -> the input that tells its shape, and by which dimensions


class EveryIndex(TorchFunctionMode):
    """Mode in which `for i in hit.nonzero()` runs over every index of the flags `hit`, as numbers that can be traced.

    Attributes:
        spared: for every such loop whether it left anything out in the original.
        beyond: how many of the last indices are left out.
    """

    def __init__(self, tracing: bool, beyond: int = 0) -> None:
        super().__init__()
        self.tracing, self.spared, self.beyond = tracing, [], beyond
        self.loops: set[tuple[str, str]] = set()  # the functions that they are in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__format__ and args[0].ndim == 0:
            return format(args[0].item(), args[1])  # a name such as f"expert_{i}"
        result = func(*args, **(kwargs or {}))
        flags: Any = args[0] if args else None
        if func in (torch.Tensor.nonzero, torch.nonzero) and isinstance(result, Tensor) and _is_flags(flags):
            if not self.tracing:
                self.spared.append(len(result) < len(flags))  # type: ignore[arg-type]
            self.loops.add(_function())
            return [torch.tensor([i]) for i in range(flags.shape[0] - self.beyond)]
        if func is torch.where and self.tracing and len(args) == 1 and _function() in self.loops:
            torch._check(result[0].shape[0] >= 1)  # `if not len(rows): continue` has to mean the same as going on
        return result


def _function() -> tuple[str, str]:
    """Return file and name of the user's function that runs."""
    line = running_line()
    assert line is not None
    return line.filename, line.name


def _is_flags(value: Any) -> bool:
    flags = isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1
    return flags and isinstance(value.shape[0], int)


def every_index(attempt: Attempt, beyond: int = 0) -> tuple[str, AssumptionProof]:
    """Run loops over the indices that are hit, such as experts with tokens, over all indices."""
    attempt.contexts.append(EveryIndex(tracing=True, beyond=beyond))
    note = "captured with loops over the indices that are hit (such as experts with tokens) running over all indices"
    return note, lambda trial: _prove_every_index(trial, beyond)


def all_but_the_last(attempt: Attempt) -> tuple[str, AssumptionProof]:
    """Run these loops over all indices but the last, on which the model itself fails: a class for tokens without an
    expert, which no call hits."""
    note, proof = every_index(attempt, beyond=1)
    return f"{note} but the last, on which the model itself fails", proof


def _prove_every_index(trial: Trial, beyond: int) -> Trial:
    """Prove that the model computes the same, on inputs for which each of its loops leaves something out."""
    outside: IndexError | None = None
    for dims in range(3):
        inputs = trial.mapped(lambda t, dims=dims: alike(t, dims))
        every = EveryIndex(tracing=False, beyond=beyond)
        try:
            usual, other = trial.outputs(inputs), trial.outputs(inputs, every)
        except Exception as error:  # the model does not take such inputs
            outside = error if isinstance(error, IndexError) else outside
            continue
        if every.spared and all(every.spared):
            trial.demand_equal(usual, other, "with loops over all indices, not only those that are hit,")
            return trial.on(inputs)
    if outside is not None:
        raise outside
    raise CaptureError("it could not be shown that a loop may run over all indices, not only those that are hit")


def alike(tensor: Tensor, dims: int) -> Tensor:
    """Make a tensor equal along the first `dims` dimensions: equal tokens have equal experts."""
    for d in range(min(dims, tensor.ndim)):
        tensor = tensor.narrow(d, 0, min(1, tensor.shape[d])).expand(tensor.shape)
    return tensor


# ---- masks -----------------------------------------------------------------------------------------------------------

# A mask that may be left out, the input that it masks, and which dimensions of that it has.
MASKS = (
    (r"(?P<side>\w+?_)??(attention_)?mask", r"{side}inputs?_\w+", (0, 1)),
    (r"pixel_mask", r"pixel_values", (0, 2, 3)),
)


def masks_of_ones(attempt: Attempt) -> tuple[str, AssumptionProof] | None:
    """Give the masks that were not given: a default that the model makes for itself is left out under torch.export."""
    original, signature = attempt.bare.forward, inspect.signature(attempt.bare.forward)
    missing = _missing(signature, attempt.args, attempt.kwargs)
    if not missing:
        return None

    def forward(*args: Any, **kwargs: Any) -> Any:
        full = _with_ones(signature, missing, args, kwargs)
        return original(*full.args, **full.kwargs)

    attempt.contexts.append(forwarding(attempt.bare, forward, signature))
    names = ", ".join(missing)
    note = f"captured with masks of ones for {names}: without them torch.export does not take the model's own default"
    return note, lambda trial: _prove_masks(trial, signature, missing)


def _missing(signature: inspect.Signature, args: Any, kwargs: Any) -> Missing:
    """List the masks that were not given."""
    missing: Missing = {}
    arguments = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if arguments.get(name) is not None or parameter.default is not None:
            continue
        for mask, masked, dims in MASKS:
            if match := re.fullmatch(mask, name):
                pattern = masked.format(side=match.groupdict().get("side") or "")
                like = [n for n, v in arguments.items() if isinstance(v, Tensor) and re.fullmatch(pattern, n)]
                if like and arguments[like[0]].ndim > max(dims):
                    missing[name] = like[0], dims
    return missing


def _with_ones(signature: inspect.Signature, missing: Missing, args: Any, kwargs: Any) -> Inputs:
    """Fill in the missing masks of a call."""
    bound = signature.bind(*args, **kwargs)
    for name, (like, dims) in missing.items():
        masked = bound.arguments[like]
        bound.arguments[name] = torch.ones([masked.shape[d] for d in dims], dtype=torch.long, device=masked.device)
    return Inputs(*bound.args, **bound.kwargs)


def _prove_masks(trial: Trial, signature: inspect.Signature, missing: Missing) -> Trial:
    """Prove that the model computes the same with and without the masks, where the inputs hold padding too."""
    inputs = trial.mapped()
    bound = signature.bind(*inputs.args, **inputs.kwargs)
    for like, _ in missing.values():
        bound.arguments[like] = _padded(bound.arguments[like], trial.model)
    padded = Inputs(*bound.args, **bound.kwargs)
    usual = trial.outputs(padded)
    other = trial.outputs(_with_ones(signature, missing, padded.args, padded.kwargs))
    trial.demand_equal(usual, other, "with masks of ones in place of none")
    return trial.on(padded)


def _padded(tensor: Tensor, model: nn.Module) -> Tensor:
    """End token ids in ids that a model may take for padding."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    padding_ids = [getattr(getattr(model, "config", None), "pad_token_id", None), *(m.padding_idx for m in tables)]
    words = max((m.num_embeddings for m in tables), default=0)
    ids = sorted({i for i in (0, 1, *padding_ids) if isinstance(i, int) and 0 <= i < words})
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.ndim != 2 or tensor.shape[1] <= len(ids):
        return tensor
    return torch.cat([tensor[:, : -len(ids)], tensor.new_tensor(ids).expand(len(tensor), -1)], 1) if ids else tensor
