"""What is sent of a value in place of all its bytes: its numbers in a narrower type, or the largest of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .graph import tensors
from .layouts import I, Layout, R

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


PAIR = 16  # bytes of a value and its place, two numbers of 64 bits: what a rank sends of a row for an argmax


def argmax_share(node: fx.Node, src: Layout, dst: Layout, tp: int) -> float | None:
    """The part of a value's bytes that greedy `generate()` sends for it, whose ranks exchange the largest of each row.

    Args:
        node: of the value. src, dst: the layouts before and after a gather. tp: ranks, of which each has a pair a row.

    Returns: None where the value is read by other operators, or is not split in columns: it is gathered.
    """
    value = next(iter(tensors(node)), None)
    if value is None or not value.dtype.is_floating_point or any(user.op != "output" for user in node.users):
        return None
    if dst not in (I, R) or src.sharded_dim != value.ndim - 1 or not isinstance(value.shape[-1], int):
        return None
    return min(1.0, PAIR * tp / (value.shape[-1] * value.element_size()))
