"""Histories of largest absolute values for delayed scaling: buffers of a copy of the model, saved as others are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autotp.capture.copies import copied
from autotp.ir.precision import DELAYED, HISTORY, LATEST, Precision


def with_histories(model: Any, precision: Precision | None) -> Any:
    """A copy of the model whose large linear layers have histories; the model itself where that is so, or not wanted.

    A history is [3, length]: of the input, the weight and the product's gradient, the newest last; zeros at first.
    Beside it is the gradient's value of the last backward, [], which the next call records.

    Args:
        model: it stays as it is, and the copy shares its tensors. precision: only delayed scaling wants any.
    """
    if precision is None or precision.recipe != DELAYED or not isinstance(model, nn.Module):
        return model
    taken = [name for name, module in model.named_modules() if _takes(precision, name, module)]
    if not taken or hasattr(model.get_submodule(taken[0]), HISTORY):
        return model
    made = copied(model, lambda tensor: tensor)
    for name in taken:
        layer: Any = made.get_submodule(name)
        weight = layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = torch.device("cpu") if weight.is_meta else weight.device
        layer.register_buffer(HISTORY, torch.zeros(3, precision.history, dtype=dtype, device=device))
        layer.register_buffer(LATEST, torch.zeros((), dtype=dtype, device=device))
    return made


def _takes(precision: Precision, name: str, module: nn.Module) -> bool:
    """Whether it is a linear layer that the recipe may take."""
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        return False
    return precision.takes(f"{name}.weight".removeprefix("."), *module.weight.shape)
