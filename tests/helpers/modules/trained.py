"""Models of one type throughout, for training next to one device; a few steps of any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import transformer


def model_of(name: str, dtype: torch.dtype, **changed: Any) -> nn.Module:
    """A model of this type throughout: transformers' own RMS norm computes in float32, so torch's takes its place."""
    model = transformer(name, **changed)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon)  # type: ignore[arg-type]
            norm.weight = module.weight  # type: ignore[assignment]
            model.set_submodule(path, norm)
    model.to(dtype).train()
    assert sum(p.numel() for p in model.parameters()) <= 500_000
    return model


def three_steps(module: Any, make: Callable[[Any], Any], loss_of: Callable[[Any], Tensor]) -> None:
    """Of the optimizer that `make` makes of a list of parameters, by a closure where it needs one."""
    optimizer = make(list(module.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    for _ in range(3):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
