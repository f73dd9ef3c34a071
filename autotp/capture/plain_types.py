"""Plain Python within a traced forward: `type(x) is torch.Tensor` of fake tensors, whose type is another; flags that
are computed from symbolic sizes (`is_causal=length > 1`), for which torch's attention wants a bool; and sets of sizes
(`len(set(lengths)) > 1`), which have no hash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from autotp import compat


class _Answers(type):
    """Makes classes that stand for their base, one of Python's own; `answer` says what a call gives."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """What `answer` of the class gives."""
        return cls.answer(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__ or object)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, cls.__base__ or object)

    def __getitem__(cls, item: Any) -> Any:
        return cls.__base__[item]  # type: ignore[index]


class PlainType(type, metaclass=_Answers):
    """Stands for `type` in the modules of a traced model's classes."""

    @staticmethod
    def answer(*args: Any, **kwargs: Any) -> Any:
        """What `type` does, but for fake tensors."""
        if len(args) == 1 and not kwargs and isinstance(args[0], compat.FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return type(*args, **kwargs)


class PlainSet(set, metaclass=_Answers):
    """Stands for `set` there."""

    @staticmethod
    def answer(values: Iterable[Any] = ()) -> Any:
        """A set, of which symbolic sizes are known by comparing them."""
        values = list(values)
        symbolic = any(isinstance(x, torch.SymInt) for x in values)
        return Sizes(values) if symbolic else set(values)


class Sizes(MutableSet):  # type: ignore[type-arg]
    """A set of which some are symbolic sizes: whether two are one is decided as a branch over them is."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._values: list[Any] = []
        for value in values:
            self.add(value)

    def __contains__(self, value: Any) -> bool:
        return any(value == one for one in self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any) -> None:
        if value not in self:
            self._values.append(value)

    def discard(self, value: Any) -> None:
        self._values = [one for one in self._values if one != value]


STANDING = {"type": PlainType, "set": PlainSet}


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

    `type(x)` of a fake tensor is what it would be of the real one, attention takes a condition on sizes as a flag, and
    a set counts sizes that differ.
    """
    attention = F.scaled_dot_product_attention
    flagged = _decided(attention)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flagged))
        for file in files_of(model):
            others = {name: flagged for name, value in file.items() if value is attention}
            others |= {name: standing for name, standing in STANDING.items() if name not in file}
            stack.enter_context(mock.patch.dict(file, others))
        yield
