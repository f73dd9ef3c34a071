"""Dropout by global counter: the same mask as `autotp.kernels.operators` draws, bit by bit.

It is `autotp::counter_dropout_fused`, which replaces the operator without the suffix where kernels are asked for. The
number of an element is drawn where the element is dropped and again for its gradient, so a forward reads x, writes the
result, and keeps nothing but the seed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from torch import Tensor

from .common import DTYPES, jit, register, tl
from .operators import OTHER, _dropout_fake, counter_dropout, differentiable_dropout
from .tiles import empty_like, loaded, power_of_two, tiles

TILE = 1024
BITS = 24  # of a number, as in `counter_uniform`
NOWHERE, ROWS, COLUMNS = range(3)  # which index of an element `place` maps to the whole


@jit
def _uniform_bits(seed, index):
    """Draw the upper 24 bits of SplitMix64 for these indices (Steele, Lea and Flood 2014), as int32."""
    state = index.to(tl.uint64) + tl.load(seed).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = state * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.int32)


@jit
def _where(place, columns, length, whole, BY: tl.constexpr, TILE: tl.constexpr):
    """Place a program's elements: their column, their index in this part, and their index in the whole."""
    blocks = tl.cdiv(columns, TILE)
    row = tl.program_id(0).to(tl.int64) // blocks
    column = tl.program_id(0).to(tl.int64) % blocks * TILE + tl.arange(0, TILE)
    index = row * columns + column
    if BY == 1:
        index = (row // length * whole + tl.load(place + row % length)) * columns + column
    if BY == 2:
        index = row * whole + tl.load(place + column, mask=column < columns, other=0)
    return column, row * columns + column, index


@jit
def _drop(x, out, seed, place, columns, length, whole, least, keep, BY: tl.constexpr, TILE: tl.constexpr):
    column, here, index = _where(place, columns, length, whole, BY, TILE)
    inside = column < columns
    value = loaded(x + here, inside)
    result = tl.where(_uniform_bits(seed, index) >= least, tl.div_rn(value, keep), 0.0)
    tl.store(out + here, result, mask=inside)


def _launch_dropout(
    x: Tensor, seed: Tensor, place: Tensor | None, dim: int, whole: Sequence[int], p: float,
    other: Tensor | None = None, other_dim: int = 0,
) -> Tensor:  # fmt: skip
    if x.dtype not in DTYPES or other is not None or not _counts(x.shape, place, dim, whole):
        return counter_dropout(x, seed, place, dim, whole, p, other, other_dim)
    out = empty_like(x)
    if out.numel():
        rows, by, *sizes = _layout(x.shape, place, dim, whole)
        tile = power_of_two(sizes[0], TILE)
        place = seed if place is None else place.contiguous()
        arguments = x.contiguous(), out, seed, place, *sizes, _least(p), 1 - p if p < 1 else 1.0
        _drop[(rows * tiles(sizes[0], tile),)](*arguments, BY=by, TILE=tile)
    return out


def _counts(size: Sequence[int], place: Tensor | None, dim: int, whole: Sequence[int]) -> bool:
    """Say whether all dimensions but that of `place` are whole, so that an index in them is one in the whole."""
    return all(n == m or (place is not None and d == dim) for d, (n, m) in enumerate(zip(size, whole, strict=True)))


def _layout(size: Sequence[int], place: Tensor | None, dim: int, whole: Sequence[int]) -> tuple[int, ...]:
    """Return rows, the index that `place` maps, columns, and the length of that dimension here and in the whole."""
    if place is None:
        return 1, NOWHERE, math.prod(size), 1, 1
    if dim == len(size) - 1:
        return math.prod(size[:-1]), COLUMNS, size[dim], size[dim], whole[dim]
    return math.prod(size[: dim + 1]), ROWS, math.prod(size[dim + 1 :]), size[dim], whole[dim]


def _least(p: float) -> int:
    """Return the least 24-bit integer that `counter_uniform(...) >= p` keeps: torch compares in float32."""
    return math.ceil(struct.unpack("f", struct.pack("f", p))[0] * 2**BITS)


register(
    f"counter_dropout_fused(Tensor x, Tensor seed, Tensor? place, int dim, SymInt[] whole, float p{OTHER}) -> Tensor",
    twin=counter_dropout, launch=_launch_dropout, fake=_dropout_fake,
)  # fmt: skip
differentiable_dropout("counter_dropout_fused")
