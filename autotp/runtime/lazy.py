"""A sharded module that does not know its inputs yet: it is captured at its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from autotp.comm.turn import Turn
from autotp.errors import StateError
from autotp.inputs import Inputs
from autotp.plans.plan import Plan

from .module import ShardedModule
from .part import whole_class
from .programs import Source

EARLY = (
    "this module is sharded at its first call, because autotp.compile was given no example_inputs; before that it has "
    "no parameters, state or submodules (an optimizer built on them would be stale). Call it once, or pass "
    "example_inputs."
)


def _early(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(EARLY)


class LazyModule(ShardedModule):
    """Becomes a `ShardedModule` at its first call; `train` and `eval` are remembered, the rest raises `StateError`."""

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[Inputs], tuple[nn.Module, Plan, Source]],
        kind: type[ShardedModule] = ShardedModule,
    ) -> None:
        nn.Module.__init__(self)
        self.training = model.training
        self.config = getattr(model, "config", None)
        self._original, self._leaf = type(model).__name__, ""
        self._build, self._kind = build, kind

    @Turn("the first call of a module")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Capture and shard for these inputs, then call that sharded module, which this is then."""
        self._begin(Inputs(*args, **kwargs))
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do so without hooks."""
        self._begin(Inputs(*args, **kwargs))
        return self.forward(*args, **kwargs)

    def _begin(self, inputs: Inputs) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            parts, mode = self._build(inputs), self.training
            hooks = {k: v for k, v in self.__dict__.items() if "hook" in k}
            kind = self._kind
            self.__class__ = whole_class(parts[0], kind)
            kind.__init__(self, *parts)
        del self._build, self._kind  # they hold the original, and a process group, which cannot be copied
        self.__dict__.update(hooks)
        if mode != parts[0].training:
            self.train(mode)

    def train(self, mode: bool = True) -> LazyModule:
        """Set the mode that the module will be in."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Says why there is nothing to see yet."""
        return "sharded at its first call"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: {EARLY}") from None

    parameters = named_parameters = buffers = named_buffers = requires_grad_ = zero_grad = _apply = _early
    modules = named_modules = children = named_children = get_submodule = get_parameter = get_buffer = apply = _early
    _shards = _calls = plan = graph = property(_early)  # type: ignore[assignment]
