"""Plain Python within a traced forward: `type(x) is torch.Tensor` of fake tensors, whose type is another, and flags
that are computed from symbolic sizes (`is_causal=length > 1`), for which torch's attention wants a bool."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from autotp import compat


class _Answers(type):
    """What `type` does, but for fake tensors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], compat.FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class PlainType(type, metaclass=_Answers):
    """Stands for `type` in the modules of a traced model's classes."""


def files_of(model: nn.Module) -> list[dict[str, Any]]:
    """What the files of a model's classes name, but for torch's own."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def _decided(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function to which conditions on sizes are handed as they are for the example, which becomes a guard."""

    def call(*args: Any, **kwargs: Any) -> Any:
        keywords = {name: _plain(x) for name, x in kwargs.items()}
        return own(*map(_plain, args), **keywords)

    return call


def _plain(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value


@contextmanager
def plain_values(model: nn.Module) -> Iterator[None]:
    """Within this context the files of a model find plain types and bools where the model itself finds them.

    `type(x)` of a fake tensor is what it would be of the real one, and attention takes a condition on sizes as a flag.
    """
    attention = F.scaled_dot_product_attention
    flagged = _decided(attention)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flagged))
        for file in files_of(model):
            others = {name: flagged for name, value in file.items() if value is attention}
            others |= {"type": PlainType} if "type" not in file else {}
            stack.enter_context(mock.patch.dict(file, others))
        yield
