"""Ways in by `generate()`, in its modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .context import Context, Numbers

TOKENS = 4


class Callback:
    """A logits processor, or a streamer, which looks only."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.context.used()
        return scores

    def put(self, value: Any) -> None:
        """As a streamer has it."""
        self.context.used()

    def end(self) -> None:
        """Likewise."""


class Criterion:
    """A stopping criterion that goes on."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.context.used()
        return torch.zeros(len(ids), dtype=torch.bool)


def _generate(context: Context, rows: int | None = None, **options: Any) -> Numbers:
    """New tokens for the rows of this rank."""
    if context.left_out:
        return {}
    ids = context.own(context.batch(0)[0])[:rows]
    more = {"max_new_tokens": TOKENS, "do_sample": False} | options | context.options
    return {"tokens": context.model.generate(ids, **more)}


def greedy(context: Context) -> Numbers:
    """The likeliest token, with a logits processor where something happens amid it."""
    amid: dict[str, Any] = {"logits_processor": [Callback(context)]} if context.use is not None else {}
    return _generate(context, **amid)


def sample(context: Context) -> Numbers:
    """Tokens that are drawn, with a stopping criterion."""
    amid: dict[str, Any] = {"stopping_criteria": [Criterion(context)]} if context.use is not None else {}
    return _generate(context, do_sample=True, **amid)


def beams(context: Context) -> Numbers:
    """The likeliest of several continuations, with a hook."""
    with context.hook():
        return _generate(context, num_beams=2)


def lookup(context: Context) -> Numbers:
    """Drafts from the prompt, with a logits processor."""
    amid: dict[str, Any] = {"logits_processor": [Callback(context)]} if context.use is not None else {}
    return _generate(context, 1, prompt_lookup_num_tokens=2, **amid)


def stream(context: Context) -> Numbers:
    """Tokens as they come, to a streamer on each rank."""
    return _generate(context, 1, streamer=Callback(context))


def static(context: Context) -> Numbers:
    """With a static cache."""
    return _generate(context, cache_implementation="static")
