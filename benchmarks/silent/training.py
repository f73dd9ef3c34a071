"""Ways in of a training loop: calls, backwards, clipping, optimizers, and what is read of the module between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

from .context import Context, Numbers


def call(context: Context) -> Numbers:
    """A forward."""
    if context.left_out:
        return {}
    keep = context.option("logits_to_keep", 0)
    return {"logits": context.own(context.forward(0, **({"logits_to_keep": keep} if keep else {})))}


def backward(context: Context) -> Numbers:
    """A forward and its backward."""
    with context.hook("full_backward_hook"):
        with context.quiet():
            loss = context.loss(0)
        if context.left_out:
            return {}
        loss.backward()
    return context.gradients()


def clip(context: Context) -> Numbers:
    """Clipping of the gradients of a backward, and a step of SGD."""
    optimizer = SGD(context.parameters(), lr=context.rate)
    with context.quiet():
        _stepped(context)
    if context.left_out:
        return {}
    most, kind = context.option("max_norm", 0.1), context.option("norm_type", 2.0)
    if context.pipe is not None:
        norm = context.pipe.clip_grad_norm_(most, kind)
    else:
        norm = nn.utils.clip_grad_norm_(context.parameters(), most, kind)
    optimizer.step()
    return {"norm": _whole(norm), **context.weights()}


def step(context: Context) -> Numbers:
    """A step of AdamW."""
    optimizer = AdamW(context.parameters(), lr=context.rate, weight_decay=context.option("weight_decay", 0.1))
    if context.use is not None:
        optimizer.register_step_pre_hook(lambda *_: context.used())
    with context.quiet():
        _stepped(context)
    if context.left_out:
        return {}
    optimizer.step()
    return context.weights()


def closure(context: Context) -> Numbers:
    """A step of an optimizer that calls a closure several times."""
    optimizer = LBFGS(context.parameters(), lr=context.rate, max_iter=context.option("max_iter", 2))

    def compute() -> Tensor:
        optimizer.zero_grad()
        with context.quiet():
            loss = context.loss(0)
            loss.backward()
        context.used()
        return loss

    if context.left_out:
        return {}
    optimizer.step(compute)
    return context.weights()


def accumulate(context: Context) -> Numbers:
    """Gradients of two backwards, with dp summed by the last one."""
    for number in (0, 1):
        loss = context.loss(number)
        if context.left_out and number:
            return {}
        if context.sharded and context.mesh.dp > 1 and not number:
            with context.model.no_sync():
                loss.backward()
        else:
            loss.backward()
    return context.gradients()


def state(context: Context) -> Numbers:
    """The whole state."""
    return {} if context.left_out else context.weights()


def gradients(context: Context) -> Numbers:
    """The whole gradients, which a backward has left."""
    with context.quiet():
        _stepped(context)
    return {} if context.left_out else context.gradients()


def parts(context: Context) -> Numbers:
    """`state_dict()`, and the whole of each DTensor in it."""
    if context.left_out:
        return {}
    return {n: _whole(t) for n, t in context.model.state_dict().items()}


def convert(context: Context) -> Numbers:
    """`.to` a type."""
    if context.left_out:
        return {}
    context.model.to(context.option("dtype", torch.float32))
    return context.weights()


def pipe_step(context: Context) -> Numbers:
    """A step of the stages, of whose micro-batches the original has the mean of the losses."""
    if context.left_out:
        return {}
    return {"loss": _stepped(context), **context.gradients()}


def pipe_evaluate(context: Context) -> Numbers:
    """An evaluation of the stages."""
    if context.left_out:
        return {}
    return {"loss": _evaluated(context, 0)}


def after(context: Context) -> Numbers:
    """The call that follows, whatever the way in was."""
    with torch.no_grad(), context.quiet():
        return {"logits after it": context.own(context.forward(2))}


def _evaluated(context: Context, number: int) -> Tensor:
    """The loss of a batch, with pp by the stages."""
    if context.pipe is None:
        with torch.no_grad():
            return context.loss(number)
    ids, targets = context.batch(number)
    with context.hook():
        return context.pipe.evaluate(context.schedule, input_ids=ids, target=targets)


def _stepped(context: Context) -> Tensor:
    """The loss of a batch after its backward, with pp by the stages."""
    if context.pipe is None:
        loss = context.loss(0)
        loss.backward()
        return loss.detach()
    ids, targets = context.batch(0)
    with context.hook():
        return context.pipe.step(context.schedule, input_ids=ids, target=targets)


def _whole(value: Any) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
