"""Deep copies of a model, with other tensors in place of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
