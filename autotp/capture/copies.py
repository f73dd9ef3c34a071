"""Deep copies of a model: with other tensors in place of its parameters and buffers, or with further buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp.ir.precision import DELAYED, HISTORY, LATEST, Precision

Module = TypeVar("Module", bound=nn.Module)


class _Detached(TorchFunctionMode):
    """Tensors that were computed, such as a weight that a hook makes anew at every call, are copied without their
    history; torch refuses to copy them."""

    def __init__(self, other: Callable[[Tensor], Tensor | None] | None) -> None:
        super().__init__()
        self.other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        copy = self.other(tensor) if self.other is not None else None
        if copy is None and tensor.is_leaf:
            return func(tensor, memo)
        memo[id(tensor)] = copy = tensor.detach().clone() if copy is None else copy
        return copy


def copied(
    model: Module, replace: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor | None] | None = None
) -> Module:
    """A deep copy of a model; the user's own is left as it is.

    Args:
        replace: what the copy holds in place of a parameter or buffer.
        other: the same for any other tensor in an attribute; where it is left out or gives None, a copy of its values.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = replace(tensor)
    with _Detached(other), torch.inference_mode(False):
        return copy.deepcopy(model, memo)


def with_histories(model: Any, precision: Precision | None) -> Any:
    """A copy of the model whose large linear layers have histories; the model itself where that is so, or not wanted.

    A history is [3, length]: of the input, the weight and the product's gradient, the newest last; zeros at first.
    Beside it is the gradient's value of the last backward, [], which the next call records. They are in a copy, and not
    in the skeleton alone, for the self-check, proofs and the tree of parts read a model's tensors by name.

    Args:
        model: it stays as it is, and the copy shares its tensors. precision: only delayed scaling wants any.
    """
    if precision is None or precision.recipe != DELAYED or not isinstance(model, nn.Module):
        return model
    layers = [name for name, module in model.named_modules() if _takes(precision, name, module)]
    if not layers or hasattr(model.get_submodule(layers[0]), HISTORY):
        return model
    model_copy = copied(model, lambda tensor: tensor)
    for name in layers:
        layer: Any = model_copy.get_submodule(name)
        weight = layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = torch.device("cpu") if weight.is_meta else weight.device
        layer.register_buffer(HISTORY, torch.zeros(3, precision.history, dtype=dtype, device=device))
        layer.register_buffer(LATEST, torch.zeros((), dtype=dtype, device=device))
    return model_copy


def _takes(precision: Precision, name: str, module: nn.Module) -> bool:
    """Whether it is a linear layer that the recipe may take."""
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        return False
    return precision.takes(f"{name}.weight".removeprefix("."), *module.weight.shape)
