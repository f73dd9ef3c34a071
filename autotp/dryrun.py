"""A trial of module boundaries on the model itself, without numbers: does its code run on the parts of a rank?

A view that names the number of heads, or a split by a width from the config, wants the whole. The graph cannot tell
such a number from one that was read off a tensor, so the forward is run on fake tensors, and what a module would leave
split is cut to a rank's width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import compat
from .boundaries import Boundary
from .inputs import Inputs


class Trial:
    """A skeleton of a model and its inputs, to run with boundaries."""

    def __init__(self, bare: nn.Module, inputs: Inputs, tp: int) -> None:
        self.tp, self.model = tp, bare
        held = next(iter((*bare.parameters(), *bare.buffers())), None)
        self.mode = compat.fake_mode() if held is None else held.fake_mode  # type: ignore[union-attr]
        self.device = torch.device("cpu") if held is None else held.device
        self.given = compat.tree_map_only(Tensor, self._fake, (inputs.args, dict(inputs.kwargs)))
        self.path: list[str] = []

    def failing(self, boundaries: Iterable[Boundary]) -> tuple[str, str] | None:
        """The innermost module whose code does not run with these boundaries, and its error; None where all does."""
        self.path, hooks = [], []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: self.path.append(name)))
            hooks.append(module.register_forward_hook(lambda m, args, out: self._leave()))
        for b in boundaries:
            module: Any = self.model.get_submodule(b.module)
            if b.kind == "row" and b.given is not None and not b.spread[0]:
                width = module.in_features
                hooks.append(module.register_forward_pre_hook(lambda m, args, w=width: (self._whole(args[0], w),)))
            if b.kind == "column" and b.left is not None and not b.spread[1]:
                hooks.append(module.register_forward_hook(lambda m, args, out: self._part(out)))
        try:
            with self.mode, torch.no_grad():
                self.model(*self.given[0], **self.given[1])
        except Exception as e:  # of whatever kind: the model's own code raises it
            return self.path[-1] if self.path else "", (str(e).splitlines() or [type(e).__name__])[0]
        finally:
            for hook in hooks:
                hook.remove()
        return None

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
