"""Several small conversions as one, whose backward is one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .conversions import f_star
from .linears import Place


def f_bucket(tensors: Sequence[Tensor], *, rank: int, tp: int, group: str) -> tuple[Tensor, ...]:
    """The conversion f of several tensors: nothing is sent forward; backward one all-reduce for each dtype.

    Args:
        tensors: what this rank holds, the same on every rank.
        rank, tp, group: this process on the axis, and the group's name.

    Returns:
        The same tensors; each rank's gradient of one is a summand.
    """
    return _Bucket.apply((rank, tp, group), *tensors)  # type: ignore[no-any-return]


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Place, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.place = place
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        rank, tp, group = ctx.place
        named = {"rank": rank, "tp": tp, "group": group}
        wanted = [i for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[1 + i]]
        given: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(grads[i].dtype for i in wanted):  # type: ignore[union-attr]
            same: list[tuple[int, Tensor]] = [
                (i, g) for i in wanted if (g := grads[i]) is not None and g.dtype == dtype
            ]
            flat = torch.cat([g.flatten() for _, g in same]) if len(same) > 1 else same[0][1]
            total = f_star(flat, ("P", "sum"), ("I",), **named)
            parts = total.split([g.numel() for _, g in same]) if len(same) > 1 else [total]
            for (i, g), part in zip(same, parts, strict=True):
                given[i] = part.view(g.shape)
        return None, *given
