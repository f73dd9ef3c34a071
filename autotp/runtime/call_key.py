"""One call's inputs in one form, so that equal calls find one program however they were written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.capture.request import Mode
from autotp.inputs import Inputs, bind, without_cache


@dataclass(frozen=True)
class Slot:
    """Stands for the tensor at this position of a call's flat inputs."""

    index: int


@dataclass(frozen=True)
class Form:
    """Meaning of a call but for its tensors: `key` is equal for equal meanings; `order` says where the tensors, in the
    key's order, lie in the call's flat inputs."""

    key: Hashable
    order: tuple[int, ...]


class CallKey(NamedTuple):
    """The key of a kind of call: by it programs are known. Sizes are never in it.

    Attributes:
        mode: that the module is called in. of: what was set on its parts, which module of it is called, and why its
            states are refused. grad: whether gradients are recorded.
        spec: how the leaves are nested. leaves: type, dimensions and whether a gradient is wanted of each tensor, type
            and value of what is none.
    """

    mode: Mode
    of: Hashable
    grad: bool
    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of_call(cls, mode: Mode, of: Hashable, flat: Sequence[Any], spec: Any) -> CallKey:
        """The key of a call with these leaves."""
        grad = torch.is_grad_enabled()
        leaves = [
            (x.dtype, x.ndim, grad and x.requires_grad) if isinstance(x, Tensor) else (type(x), x) for x in flat
        ]  # fmt: skip
        return cls(mode, of, grad, spec, tuple(leaves))


def form(bare: nn.Module, flat: Sequence[Any], spec: Any) -> tuple[Form, Inputs]:
    """The form of a call of `bare`, and its inputs with the cache switched off.

    Args:
        bare: the module; its `forward` says the names.
        flat, spec: `tree_flatten((args, kwargs))`.

    Raises:
        InputError: the inputs do not fit `forward`.
    """
    slots: list[Any] = []
    for i, v in enumerate(flat):
        slots.append(Slot(i) if isinstance(v, Tensor) else v)
    args, kwargs = compat.tree_unflatten(slots, spec)
    inputs, _ = without_cache(bare, Inputs(*args, **kwargs), running=True)
    leaves, shape = compat.tree_flatten(_by_name(bare.forward, inputs))
    values: list[Any] = []
    for x in leaves:
        values.append(None if isinstance(x, Slot) else (type(x), x))
    key = (shape, tuple(values))
    order = tuple(x.index for x in leaves if isinstance(x, Slot))
    whole = compat.tree_map(lambda x: flat[x.index] if isinstance(x, Slot) else x, (inputs.args, dict(inputs.kwargs)))
    return Form(key, order), Inputs(*whole[0], **whole[1])


def _by_name(forward: Callable[..., Any], inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name in the order of the signature, without those that equal their default."""
    bound = bind(forward, inputs)
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            by_name |= dict(sorted(value.items()))
        elif value is not parameter.default:
            by_name[name] = value
    if by_name.get("use_cache") is False:  # captures are without a cache, said or unsaid
        del by_name["use_cache"]
    return positional, by_name
