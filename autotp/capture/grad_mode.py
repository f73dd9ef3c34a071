"""Forwards that ask whether gradients are recorded, or wanted of a tensor: they are traced for the answer that they
would get."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autotp import compat

GRAD, NO_GRAD, INFERENCE = "grad", "no_grad", "inference"


def grad_mode() -> str:
    """The grad mode that is on: `GRAD`, `NO_GRAD` or `INFERENCE`."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    return GRAD if torch.is_grad_enabled() else NO_GRAD


@dataclass
class GradModeAnswers:
    """What a traced forward is told of the grad mode; gradients are recorded in any case, to see its own regions.

    Attributes:
        mode: the grad mode around the forward. asks: whether it asked; `tensors`: whether it asked a tensor.
    """

    mode: str = GRAD
    asks: bool = False
    tensors: bool = False

    @contextmanager
    def answered(self, files: Sequence[dict[str, Any]] = ()) -> Iterator[None]:
        """Within this context a forward finds that mode; torch and this library find what is.

        `files` are what the model's files name: `from torch import is_grad_enabled` is a name there.
        """

        def answering(name: str, answer: Callable[[bool], bool]) -> Iterator[Any]:
            own: Callable[[], bool] = getattr(torch, name)

            def ask() -> bool:
                if _library(sys._getframe(1)):
                    return own()
                self.asks = True
                return answer(own())

            yield mock.patch.object(torch, name, ask)
            for file in files:
                yield mock.patch.dict(file, {n: ask for n, value in file.items() if value is own})

        enabled = answering("is_grad_enabled", lambda now: now and self.mode == GRAD)
        inference = answering("is_inference_mode_enabled", lambda now: self.mode == INFERENCE)
        with ExitStack() as stack:
            stack.enter_context(compat.tables_of_dynamo())
            for each in [*enabled, *inference, mock.patch.object(Tensor, "requires_grad", self._of_tensors())]:
                stack.enter_context(each)
            yield

    def _of_tensors(self) -> property:
        """`Tensor.requires_grad` as the forward finds it: of what it computes, no where no gradients are recorded."""
        own: Any = Tensor.requires_grad

        def read(tensor: Tensor) -> bool:
            own_flag = own.__get__(tensor)
            if _library(sys._getframe(1)):
                return own_flag
            self.asks = self.tensors = True
            return own_flag and (self.mode == GRAD or tensor.is_leaf)

        return property(read, own.__set__)


def _library(frame: FrameType) -> bool:
    """Whether torch or this library runs there, and no model."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autotp")
