"""Whether a function of torch that looks at many parameters is under way, read off the stack."""

from __future__ import annotations

import inspect
from types import CodeType, FrameType
from typing import Any

import torch

STEP: Any = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__  # around every optimizer's `step`
CLIP: Any = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__


def stepping() -> bool:
    """Whether this is called from within `step` of an optimizer of torch's kind: all ranks are in it then."""
    return _frame_of(STEP) is not None


def clipped() -> list[Any]:
    """The parameters whose gradients torch's `clip_grad_norm_` is clipping; none outside of it."""
    frame = _frame_of(CLIP)
    return [] if frame is None else list(frame.f_locals.get("parameters", ()))


def _frame_of(code: CodeType) -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
