"""How far a kernel may be from float64, by type."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 5e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def differ(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, as a part of the largest value; something that was never written is no number."""
    assert found.shape == wanted.shape and not found.isnan().any()
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
