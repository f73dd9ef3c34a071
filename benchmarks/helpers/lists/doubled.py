"""Models that name float32 in their forward, computed in float64 throughout: what differs then is no rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def doubled() -> Iterator[None]:
    """Within this context `torch.float32` and `Tensor.float()` mean float64, as does the default dtype."""
    before = torch.get_default_dtype()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
