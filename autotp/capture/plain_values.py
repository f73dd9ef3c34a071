"""Plain Python within a traced forward: `type(x) is torch.Tensor` of fake tensors, whose type is another; and flags
that are computed from symbolic sizes (`is_causal=length > 1`), for which torch's attention wants a bool."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
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


class _OfFakes(type):
    """Class of `PlainType`, which stands for `type` in every other use of the name."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Do what `type` does, but for fake tensors."""
        if len(args) == 1 and not kwargs and isinstance(args[0], compat.FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class PlainType(type, metaclass=_OfFakes):
    """Stand-in for `type` in the files of a traced model's classes."""


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
