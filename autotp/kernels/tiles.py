"""Tensors seen as rows, and the tiles of them that programs of a kernel take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import WIDE, jit, tl


def as_rows(x: Tensor) -> Tensor:
    """View as [rows, columns] with columns next to each other in memory; copy where that takes one."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # a size of torch makes a number of symbols
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def wide(x: Tensor) -> Tensor:
    """Convert to float32 at least."""
    return x.to(torch.promote_types(x.dtype, WIDE))


def power_of_two(n: int, limit: int) -> int:
    """Return the smallest power of two that is no less than n, and `limit` at most."""
    return min(1 << max(n - 1, 0).bit_length(), limit)


def tiles(n: int, size: int) -> int:
    """Count the tiles of this size that cover n."""
    return -(-n // size)


def programs(x: Tensor, multiple: int) -> int:
    """Count the programs that share a sum over rows: `multiple` for every multiprocessor of the tensor's device."""
    return multiple * (torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1)


def empty_like(x: Tensor) -> Tensor:
    """Allocate contiguous memory of x's shape and dtype."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@jit
def loaded(place, inside):
    """Load numbers in float32; 0 outside.

    Args:
        place: their addresses. inside: which of them the tensor has.
    """
    return tl.load(place, mask=inside, other=0).to(tl.float32)


@jit
def row_and_columns(columns, TILE: tl.constexpr):
    """Return the row of a program, and its columns, where tiles of columns make up a row.

    Args:
        columns: how many a row has. TILE: how many a program takes.
    """
    tiles_of_row = tl.cdiv(columns, TILE)
    return (tl.program_id(0) // tiles_of_row).to(tl.int64), tl.program_id(0) % tiles_of_row * TILE + tl.arange(0, TILE)
