"""Outputs left as DTensors: each rank's part, said in DTensor's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as Summand
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement

from autotp.ir.layouts import Layout, Partial, Shard
from autotp.runtime.storage import strides


def wrap(local: Tensor, layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """This rank's part as a DTensor, differentiable.

    Args:
        local: the part.
        layout: I, P, R (only where no gradient flows), or S in DTensor's own (plain) partition.
        shape: of the whole value.
        mesh: the tp ranks.
    """
    return _Wrap.apply(local, placement(layout), torch.Size(shape), mesh)  # type: ignore[no-any-return]


def placement(layout: Layout) -> Placement:
    """DTensor's word for a layout."""
    if isinstance(layout, Shard):
        return Split(layout.dim)
    return Summand(layout.reduction) if isinstance(layout, Partial) else Whole()


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Placement, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
        # The gradient of a summand is whole on every rank; that of a slice is the slice.
        ctx.gradient = [placement if isinstance(placement, Split) else Whole()]
        local = local.detach().contiguous()
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=strides(shape))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.redistribute(placements=ctx.gradient).to_local(), None, None, None
