"""Ways in by adapters of PEFT: set, switched off, mixed by row, and merged."""

from __future__ import annotations

import torch

from .context import Context, Numbers
from .models import ADAPTERS


def select(context: Context) -> Numbers:
    """`set_adapter`, and a forward."""
    if not context.left_out:
        context.model.set_adapter(context.option("adapter", ADAPTERS[1]))
    return _forward(context)


def switch_off(context: Context) -> Numbers:
    """A forward without them, and one with them."""
    if context.left_out:
        return _forward(context)
    with context.model.disable_adapter():
        without = _forward(context)
    return {"logits without": without["logits"], **_forward(context)}


def mix(context: Context) -> Numbers:
    """A forward in which each row has its adapter."""
    if context.left_out:
        return {}
    names = [*ADAPTERS, "__base__", ADAPTERS[0]]
    names = context.option("adapters", names)
    rows = len(context.batch(0)[0])
    return _forward(context, adapter_names=names[:rows])


def merge(context: Context) -> Numbers:
    """`merge_adapter`, a forward, and `unmerge_adapter`."""
    if context.left_out:
        return _forward(context)
    context.model.merge_adapter(context.option("merged", None))
    try:
        logits = _forward(context)
        merged = {f"{n}, merged": t for n, t in context.weights().items() if "base_layer" in n}
    finally:
        context.model.unmerge_adapter()
    return {**logits, **merged, **context.weights()}


def _forward(context: Context, **options: object) -> Numbers:
    with torch.no_grad():
        return {"logits": context.own(context.forward(0, **options))}
