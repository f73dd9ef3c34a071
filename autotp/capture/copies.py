"""Tensors that a module keeps in plain attributes and that were computed, such as the weight of the old weight norm."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from autotp import compat


def computed(model: nn.Module) -> Iterator[Tensor]:
    """Those tensors, which `copy.deepcopy` refuses as they are not leaves of autograd."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found = compat.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
                yield from (x for x in found if isinstance(x, Tensor) and not x.is_leaf)
