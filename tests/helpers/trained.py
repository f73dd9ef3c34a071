"""Models of one type throughout, for training next to one device."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.models import transformer


def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """A model of this type throughout: transformers' own RMS norm computes in float32, so torch's takes its place."""
    model = transformer(name)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon)  # type: ignore[arg-type]
            norm.weight = module.weight  # type: ignore[assignment]
            model.set_submodule(path, norm)
    model.to(dtype).train()
    assert sum(p.numel() for p in model.parameters()) <= 500_000
    return model
