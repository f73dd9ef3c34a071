"""What a rank holds of a parameter, as boxes of the whole: the one notion that loading, saving and resharding share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.errors import StateError
from autotp.ir.layouts import chunk
from autotp.runtime.storage import Piece, Storage


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it starts in the whole, and the memory of this rank that it is a view of."""

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index into the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


def whole(tensor: Tensor) -> list[Box]:
    """All of a tensor that every rank holds, such as a buffer."""
    return [Box((0,) * tensor.ndim, tensor.detach())]


def boxes(storage: Storage, pieces: Sequence[Tensor]) -> list[Box]:
    """The blocks of the original parameter that `pieces`, this rank's pieces of it, are.

    Args:
        storage: how the parameter is held.
        pieces: a DTensor for each piece; in one plain process the whole pieces. What is shaped like the pieces, such as
            an optimizer's moments, may take their place.

    Returns: boxes in the parameter's own dimensions, each a view of its piece's memory; empty ones are left out, but
        for a parameter without elements.
    """
    if math.prod(storage.shape) == 0:
        return whole(pieces[0].new_empty(storage.shape))
    dim = storage.layout.sharded_dim
    if dim is None or not storage.pieces:
        start, local = _window(pieces[0], storage.shape, None)
        return [Box(start, local)] if local.numel() else []
    out: list[Box] = []
    for t, piece in zip(pieces, storage.pieces, strict=True):
        start, local = _window(t, piece.shape, piece.dim)
        if local.numel():
            out += _unfold(storage, dim, piece, start, local)
    return out


def _window(t: Tensor, shape: Sequence[int], dim: int | None) -> tuple[tuple[int, ...], Tensor]:
    """Where this rank's part of a piece starts, and that part. tp cuts first, a data-parallel axis cuts its share."""
    start, size = [0] * len(shape), list(shape)
    local = t.detach()
    if isinstance(local, DTensor):
        mesh = local.device_mesh
        for axis in reversed(range(mesh.ndim)):
            cut = getattr(local.placements[axis], "dim", None)
            if cut is not None:
                first, size[cut] = chunk(size[cut], mesh.get_local_rank(axis), mesh.size(axis))
                start[cut] += first
        local = local.to_local()
    if math.prod(size) == 0 and local.numel() == 0:
        return tuple(start), local
    if list(local.shape) != size:
        raise StateError(
            f"a piece of shape {tuple(shape)}, split on dimension {dim}, is held here as {tuple(local.shape)} where "
            f"{tuple(size)} was expected: something other than autotp's own dp has spread it. Use "
            "full_state_dict() and load_state_dict() for this module."
        )
    return tuple(start), local


def _unfold(storage: Storage, d: int, piece: Piece, start: Sequence[int], local: Tensor) -> list[Box]:
    """A part of a piece `(..., [repeat], count, [unit], ...)` in the dimensions of its parameter."""
    repeated = storage.repeat > 1
    axis = d + repeated  # of the counts
    units = len(piece.shape) - len(storage.shape) - repeated
    unit = piece.shape[axis + 1] if units else 1
    run = storage.shape[d] // storage.repeat
    out = []
    for i in range(local.shape[d] if repeated else 1):
        block = local.select(d, i) if repeated else local
        # view, not reshape: a copy would be filled in place of the parameter
        block = block.view(*block.shape[:d], -1, *block.shape[d + 2 :]) if units else block
        at = (start[d] + i) * run if repeated else 0
        offset = (*start[:d], at + piece.offset + start[axis] * unit, *start[axis + 1 + units :])
        out.append(Box(tuple(offset), block))
    return out
