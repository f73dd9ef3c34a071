"""Values that hold numbers of a narrower type than their own, and so are sent in that without loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NARROW: dict[str, torch.dtype] = {"autotp.float8_cast.default": torch.float8_e4m3fn}
ARITHMETIC: dict[str, str] = {  # operators whose products are of another type than their results
    "autotp.float8_linear.default": "float8_e4m3fn",
    "autotp.float8_rows.default": "float8_e4m3fn",
    "autotp.float8_rows_hp.default": "float8_e4m3fn",
    "autotp.float8_delayed.default": "float8_e4m3fn",
}
GATHERS = ("all_gather", "all_to_all")  # primitives that add nothing up: sums of such numbers are none


def sent_as(target: Any, primitive: str | None) -> torch.dtype | None:
    """The type in which a primitive sends what an operator gives; None for its own."""
    return NARROW.get(str(target)) if primitive in GATHERS else None


def packed(x: Tensor, wire: torch.dtype | None) -> Tensor:
    """The numbers as bytes of `wire`, which every backend carries."""
    return x if wire is None else x.to(wire).view(torch.uint8)


def unpacked(x: Tensor, wire: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """What `packed` was given, in this type."""
    return x if wire is None else x.view(wire).to(dtype)
