"""Plain Python within a traced forward: `type(x) is torch.Tensor` of fake tensors, whose type is another; flags that
are computed from symbolic sizes (`is_causal=length > 1`), for which torch's attention wants a bool; and sets of sizes
(`len(set(lengths)) > 1`), which have no hash."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp import compat

from .copies import RECIPES
from .state_objects import forwarding


class _Answers(type):
    """Makes classes that stand for their base, one of Python's own; `answer` says what a call gives."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `answer` of the class."""
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
        """Do what `type` does, but for fake tensors."""
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
    """List the globals of the files of a model's classes, but for torch's own."""
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


# ---- calls of tensor subclasses --------------------------------------------------------------------------------------

# What tensor subclasses do within a forward is traced as if the forward did it.
#
# Torch's exporter records calls by a mode that is off while it handles one, and a subclass handles a call of a
# function inside of that: a `no_grad` there would be lost.

NO_HANDLER = "Unable to cast NotImplemented"  # torch, of a subclass that no mode of a trace takes


class _Handling(TorchFunctionMode):
    """Calls a subclass's own handler itself, so that modes see what that calls."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[Any] = []  # calls that are being handled: a subclass may leave one to torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wraps = [kind for kind in types if hasattr(kind, "__tensor_flatten__")]
        call = func, [id(x) for x in args]
        if not wraps or not inspect.ismethod(wraps[0].__torch_function__) or call in self.handled:
            return self._by_torch(func, types, args, kwargs)
        self.handled.append(call)
        try:
            with self:
                return wraps[0].__torch_function__(func, types, args, kwargs)
        finally:
            self.handled.pop()

    def _by_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Leave a call to torch; where a subclass handles it below autograd, which a trace does not get to, to that."""
        kinds: list[Any] = [type(x) for x in args if isinstance(x, Tensor) and compat.wraps_tensors(x)]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            overload = compat.overload_of(func, args, kwargs) if kinds and NO_HANDLER in str(error) else None
            if overload is None:
                raise
        with self:
            return kinds[0].__torch_dispatch__(overload, types, args, kwargs)


@contextmanager
def subclass_calls(bare: nn.Module) -> Iterator[None]:
    """Within this context a trace of the module sees what tensor subclasses do, where weights of it are such."""
    own = bare.forward
    if not any(RECIPES in vars(module) for module in bare.modules()):
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Handling():
            return own(*args, **kwargs)

    with forwarding(bare, forward, inspect.signature(own)):
        yield
