"""Several small conversions as one, whose backward is one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autotp.ir.specs import INVARIANT, REPLICATED

from .conversions import f


def f_bucket(
    tensors: Sequence[Tensor], *, rank: int, tp: int, group: str, reduces: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """The conversion f of several small tensors: nothing is sent forward; backward one all-reduce for each dtype.

    They are copied into one flat tensor, which f converts; a function over any number of tensors is nothing that Dynamo
    traces (torch 2.13).

    Args:
        tensors: what this rank holds, the same on every rank.
        rank, tp, group: this process on the axis, and the group's name. reduces: see `f`.

    Returns:
        The same tensors; each rank's gradient of one is a summand. Those that need no gradient pass.
    """
    out = list(tensors)
    graded = torch.is_grad_enabled()
    for dtype in dict.fromkeys([t.dtype for t in tensors if graded and t.requires_grad]):
        at = [i for i, t in enumerate(tensors) if t.requires_grad and t.dtype == dtype]
        flat = torch.cat([tensors[i].flatten() for i in at])
        flat = f(flat, INVARIANT, REPLICATED, rank=rank, tp=tp, group=group, reduces=reduces)
        for i, part in zip(at, flat.split([tensors[i].numel() for i in at]), strict=True):
            out[i] = part.view(tensors[i].shape)
    return tuple(out)
