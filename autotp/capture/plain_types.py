"""`type(x) is torch.Tensor` within a traced forward: the fake tensors of a trace are of a type of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
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


@contextmanager
def plain_types(model: nn.Module) -> Iterator[None]:
    """Within this context `type(x)` of a fake tensor is what it would be of the real one, in the files of a model."""
    with ExitStack() as stack:
        for held in files_of(model):
            if "type" not in held:
                stack.enter_context(mock.patch.dict(held, {"type": PlainType}))
        yield
