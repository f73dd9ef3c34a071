"""A trial of module boundaries on the model itself, without numbers: does its code run on the parts of a rank?

A view that names the number of heads, or a split by a width from the config, wants the whole. The graph cannot tell
such a number from one that was read off a tensor, so the forward is run on fake tensors, and what a module would leave
split is cut to a rank's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.inputs import Inputs

from .boundaries import Boundary

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]  # positional and named arguments of each


class FakeRun:
    """A skeleton of a model and its inputs, to run with boundaries."""

    def __init__(self, bare: nn.Module, inputs: Inputs, tp: int) -> None:
        self.tp, self.model = tp, bare
        tensor = next(iter((*bare.parameters(), *bare.buffers())), None)
        self.mode = compat.fake_mode() if tensor is None else tensor.fake_mode  # type: ignore[union-attr]
        self.device = torch.device("cpu") if tensor is None else tensor.device
        self.arguments = compat.tree_map_only(Tensor, self._fake, (inputs.args, dict(inputs.kwargs)))
        self.path: list[str] = []

    def failing(self, boundaries: Iterable[Boundary]) -> tuple[str, str] | None:
        """The innermost module whose code does not run with these boundaries, and its error; None where all does.

        Args:
            boundaries: what each module does.
        """
        self.path, hooks = [], []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: self.path.append(name)))
            hooks.append(module.register_forward_hook(lambda m, args, out: self._leave()))
        for b in boundaries:
            module: Any = self.model.get_submodule(b.module)
            if b.kind == "row" and b.in_dim is not None and not b.spread[0]:
                width = module.in_features
                hooks.append(module.register_forward_pre_hook(lambda m, args, w=width: (self._whole(args[0], w),)))
            if b.kind == "column" and b.out_dim is not None and not b.spread[1]:
                hooks.append(module.register_forward_hook(lambda m, args, out: self._part(out)))
        try:
            self._run()
        except Exception as e:  # of whatever kind: the model's own code raises it
            return self.path[-1] if self.path else "", (str(e).splitlines() or [type(e).__name__])[0]
        finally:
            for hook in hooks:
                hook.remove()
        return None

    def places(self, groups: Mapping[str, Iterable[str]]) -> dict[str, str | tuple[int, int]]:
        """Module -> the place of its argument that these modules within it read, where that is one argument.

        A place is a name, or the number of a positional argument and how many there are.

        Args:
            groups: module -> its modules that read one value.
        """
        calls: dict[str, Calls] = defaultdict(list)
        hooks = []
        for name in {*groups, *(m for modules in groups.values() for m in modules)}:
            note = partial(_note, calls[name])
            hooks.append(self.model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
        self._run()
        for hook in hooks:
            hook.remove()
        places = {}
        for name, modules in groups.items():
            place = _place(calls[name], [calls[m] for m in modules])
            if place is not None:
                places[name] = place
        return places

    def _run(self) -> None:
        with self.mode, torch.no_grad():
            self.model(*self.arguments[0], **self.arguments[1])

    def _fake(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor.detach().to(self.device), static_shapes=True)

    def _leave(self) -> None:
        self.path.pop()

    def _part(self, whole: Tensor) -> Tensor:
        return whole.narrow(-1, 0, whole.shape[-1] // self.tp)

    def _whole(self, part: Tensor, width: int) -> Tensor:
        if part.shape[-1] * self.tp != width:
            raise ValueError(f"a part is {part.shape[-1]} wide here, and {width} over {self.tp} ranks are not")
        return part.new_empty(*part.shape[:-1], width)


def _note(calls: Calls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    calls.append((args, kwargs))


def _place(outer: Calls, inner: list[Calls]) -> str | tuple[int, int] | None:
    """Which argument of a module's one call is the first argument of all these calls within it."""
    if len(outer) != 1 or any(len(calls) != 1 or not calls[0][0] for calls in inner):
        return None
    (args, kwargs), value = outer[0], inner[0][0][0][0]
    if any(calls[0][0][0] is not value for calls in inner):
        return None
    number = next((i for i, x in enumerate(args) if x is value), None)
    name = next((k for k, x in kwargs.items() if x is value), None)
    return name if number is None else (number, len(args))
