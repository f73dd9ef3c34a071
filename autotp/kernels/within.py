"""Parts of kernels: the numbers that a program loads, and its place in rows."""

from __future__ import annotations

from .common import jit, tl


@jit
def loaded(place, inside):
    """Numbers in memory, in float32; 0 outside."""
    return tl.load(place, mask=inside, other=0).to(tl.float32)


@jit
def row_and_columns(columns, TILE: tl.constexpr):
    """The row of a program, and its columns, where tiles of columns make up a row."""
    tiles_of_row = tl.cdiv(columns, TILE)
    return (tl.program_id(0) // tiles_of_row).to(tl.int64), tl.program_id(0) % tiles_of_row * TILE + tl.arange(0, TILE)
