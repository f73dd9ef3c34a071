"""Embedding with a sharded vocabulary: look-up in a rank's rows, zeros for ids that are other ranks'.

The forward reads ids and the rows that are here and writes the result, in one pass; mask and local index are never
written. The gradient is torch's own `embedding_dense_backward`, which sorts the ids and adds up in float32 without
atomics: a kernel has nothing to win there. Ids of other ranks and the padding go to a row of their own, after the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ir.op import aten, dtype_name

from .common import OPS, check_floats, differentiable, jit, refuse, register, tl
from .tiles import power_of_two, row_and_columns, tiles

TILE = 2048
IDS = (torch.int64, torch.int32)


@jit
def _look_up(weight, ids, out, start, rows, width, row_step, step, TILE: tl.constexpr):
    place, column = row_and_columns(width, TILE)
    column = column.to(tl.int64)
    row = tl.load(ids + place).to(tl.int64) - start
    columns = tl.where((row >= 0) & (row < rows), width, 0)
    value = tl.load(weight + row * row_step + column * step, mask=column < columns, other=0)
    tl.store(out + place * width + column, value, mask=column < width)


def _launch(weight: Tensor, ids: Tensor, start: int, vocabulary: int, padding: int) -> Tensor:
    in_range = (ids >= 0) & (ids < vocabulary)
    aten._assert_async.msg(in_range.all(), f"autotp: an id is none of the embedding's {vocabulary} rows")
    rows, width = weight.shape
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if out.numel():
        tile = power_of_two(width, TILE)
        grid = (ids.numel() * tiles(width, tile),)
        _look_up[grid](weight, ids.contiguous(), out, start, rows, width, *weight.stride(), TILE=tile)
    return out


def vocabulary_rows(weight: Tensor, ids: Tensor, start: int, vocabulary: int, padding: int) -> Tensor:
    """Look up this rank's summand of an embedding with a sharded vocabulary: its own rows, zeros for other ids.

    Args:
        weight: the rows of the ids from `start` on, [rows, width]; there may be none.
        ids: any shape; each from 0 to vocabulary - 1.
        start: the id of the first row. vocabulary: how many ids there are on all ranks.
        padding: an id whose row gets no gradient; -1 for none.

    Returns:
        [*ids.shape, width], contiguous.

    Raises:
        IndexError: an id is no row of the whole; on CUDA the device's assertion fails.
    """
    rows = weight.shape[0]
    mine = (ids >= start) & (ids < start + rows)
    table = weight if rows else weight.new_zeros((1, weight.shape[1]))
    in_range = (ids >= 0) & (ids < vocabulary)
    vectors = aten.embedding.default(table, torch.where(in_range, torch.where(mine, ids - start, 0), table.shape[0]))
    return torch.where(mine.unsqueeze(-1), vectors, 0)


def vocabulary_rows_backward(grad: Tensor, ids: Tensor, start: int, rows: int, padding: int) -> Tensor:
    """Compute the gradient of `vocabulary_rows` for the weight, on every device."""
    mine = (ids >= start) & (ids < start + rows) & (ids != padding)
    index = torch.where(mine, ids - start, rows)
    return aten.embedding_dense_backward.default(grad, index, rows + 1, rows, False)[:rows]


def _check(weight: Tensor, ids: Tensor, start: int, vocabulary: int, padding: int) -> None:
    check_floats("vocabulary_rows", weight=weight)
    if ids.device != weight.device:
        refuse("vocabulary_rows", f"takes ids on the weight's device, {weight.device}, and these are on {ids.device}")
    if weight.ndim != 2 or ids.dtype not in IDS:
        what = f"{list(weight.shape)} and {dtype_name(ids.dtype)}"
        refuse("vocabulary_rows", f"takes a weight of two dimensions and int64 or int32 ids, not {what}")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.start, _, ctx.padding = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return OPS.vocabulary_rows_backward(grad, ids, ctx.start, ctx.rows, ctx.padding), None, None, None, None


register(
    "vocabulary_rows(Tensor weight, Tensor ids, int start, int vocabulary, int padding) -> Tensor",
    twin=vocabulary_rows, launch=_launch, check=_check,
)  # fmt: skip
register(
    "vocabulary_rows_backward(Tensor grad, Tensor ids, int start, int rows, int padding) -> Tensor",
    twin=vocabulary_rows_backward, launch=vocabulary_rows_backward,
)  # fmt: skip
differentiable("vocabulary_rows", _gradient, _setup)
