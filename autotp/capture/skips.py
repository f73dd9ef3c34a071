"""Branches that skip work for which there is nothing, such as an expert without tokens: captured, none is skipped.

    rows, = torch.where(chosen == expert)
    if len(rows) == 0:
        continue

Work on no rows gives nothing where it adds to what is there. That it does so is proved on inputs for which the model
skips at every such line: its results are then those of the graph, which never does.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp.errors import CaptureError

from .assumptions import AssumptionProof, alike
from .export import Attempt
from .messages import the_users
from .selfcheck import Trial

ANY = (torch.any, torch.Tensor.any)
FOUND = (torch.where, torch.nonzero, torch.Tensor.nonzero)


class NoSkips(TorchFunctionMode):
    """Something is always found: by `torch.where(x)` and `x.nonzero()`, and where `x.any()` is asked.

    Attributes:
        tracing: otherwise answers stay as they are. skipped: file and line -> whether nothing was found there.
    """

    def __init__(self, tracing: bool) -> None:
        super().__init__()
        self.tracing = tracing
        self.skipped: dict[tuple[str, int], bool] = {}
        self.asked: list[Tensor] = []  # what `any` gave; held, so that none is taken for another

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and any(args[0] is x for x in self.asked):
            answer = self.tracing or func(*args)
            self._note(not answer)
            return answer
        found = func(*args, **(kwargs or {}))
        if func in ANY and isinstance(found, Tensor) and found.ndim == 0:
            self.asked.append(found)
        if func in FOUND and len(args) == 1:
            rows = found if isinstance(found, Tensor) else found[0]
            if self.tracing:
                torch._check(rows.shape[0] >= 1)
            else:
                self._note(rows.shape[0] == 0)
        return found

    def _note(self, skipped: bool) -> None:
        frames = traceback.walk_stack(sys._getframe(1))
        place = next((f.f_code.co_filename, line) for f, line in frames if the_users(f.f_code.co_filename))
        self.skipped[place] = self.skipped.get(place, False) or skipped


def no_skips(attempt: Attempt) -> tuple[str, AssumptionProof]:
    """Work for which there may be nothing is never skipped."""
    attempt.contexts.append(NoSkips(tracing=True))
    return "captured without skipping what there is nothing for (such as experts without tokens)", _prove_no_skips


def _prove_no_skips(trial: Trial) -> Trial:
    """Inputs for which the model skips wherever it may; the capture is then compared on these."""
    for dims in range(3):
        inputs = trial.mapped(lambda t, dims=dims: alike(t, dims))
        seen = NoSkips(tracing=False)
        try:
            trial.outputs(inputs, seen)
        except Exception:  # the model does not take such inputs
            continue
        if seen.skipped and all(seen.skipped.values()):
            return trial.on(inputs)
    raise CaptureError(
        "it could not be shown that work may be done where it is skipped because there is nothing for it"
    )
