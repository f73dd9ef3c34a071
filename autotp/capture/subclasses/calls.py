"""What tensor subclasses do within a forward is traced as if the forward did it.

Torch's exporter records calls by a mode that is off while it handles one, and a subclass handles a call of a function
inside of that: a `no_grad` there would be lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotp import compat
from autotp.capture.state_objects import forwarding

from .weights import RECIPES

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
        """What is left to torch: where a subclass handles it below autograd, which a trace does not get to, by that."""
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
