"""Megatron's communication written by hand: f, f*, g, g* as autograd functions, and the two ways to place them.

Shoeybi et al. 2019 (f, f*) and Korthikanti et al. 2022 (g, g*).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.compat import c10d_ops


def reduced(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' values."""
    return c10d_ops.wait_tensor(c10d_ops.all_reduce(x.contiguous(), "sum", group))


def gathered(x: Tensor, dim: int, tp: int, group: str) -> Tensor:
    """The whole of a value of which each rank has an equal slice of dimension `dim`."""
    whole = c10d_ops.wait_tensor(c10d_ops.all_gather_into_tensor(x.contiguous().unsqueeze(0), tp, group))
    return whole.movedim(0, dim).reshape(*x.shape[:dim], tp * x.shape[dim], *x.shape[dim + 1 :])


def _scattered(x: Tensor, dim: int, tp: int, group: str) -> Tensor:
    """This rank's slice of the sum."""
    parts = x.unflatten(dim, (tp, -1)).movedim(dim, 0).contiguous()
    return c10d_ops.wait_tensor(c10d_ops.reduce_scatter_tensor(parts, "sum", tp, group)).squeeze(0)


class CopyF(torch.autograd.Function):
    """f: nothing forward, the sum of the gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return reduced(grad, ctx.group), None


class ReduceF(torch.autograd.Function):
    """f*: the sum forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class GatherG(torch.autograd.Function):
    """g: all ranks' slices forward, this rank's slice of the sum of the gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tp: int, group: str) -> Tensor:
        ctx.place = dim, tp, group
        return gathered(x, dim, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _scattered(grad, *ctx.place), None, None, None


class ScatterG(torch.autograd.Function):
    """g*: this rank's slice of the sum forward, all ranks' slices backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tp: int, group: str) -> Tensor:
        ctx.place = dim, tp, group
        return _scattered(x, dim, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gathered(grad, *ctx.place), None, None, None


class GatherOutput(torch.autograd.Function):
    """All ranks' slices forward; backward this rank's slice of a gradient that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rank: int, tp: int, group: str) -> Tensor:
        ctx.place = dim, rank, tp
        return gathered(x, dim, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        dim, rank, tp = ctx.place
        own = grad.shape[dim] // tp
        return grad.narrow(dim, rank * own, own).contiguous(), None, None, None, None


class Whole(NamedTuple):
    """The untouched model: one rank, no communication."""

    rank: int = 0
    tp: int = 1
    group: str = ""

    def enter(self, x: Tensor) -> Tensor:
        """Before column-parallel matrices."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """After a row-parallel matrix, or the vocabulary-parallel embedding."""
        return x

    def norm(self, weight: Tensor) -> Tensor:
        """The weight of a norm."""
        return weight

    def gather(self, logits: Tensor) -> Tensor:
        """After the head."""
        return logits


class Plain(Whole):
    """Megatron's tensor parallelism: what is between the matrices is whole on every rank."""

    def enter(self, x: Tensor) -> Tensor:
        return CopyF.apply(x, self.group)  # type: ignore[return-value]

    def leave(self, x: Tensor) -> Tensor:
        return ReduceF.apply(x, self.group)  # type: ignore[return-value]

    def gather(self, logits: Tensor) -> Tensor:
        return GatherOutput.apply(logits, 2, self.rank, self.tp, self.group)  # type: ignore[return-value]


class Sequence(Plain):
    """With sequence parallelism: what is between the matrices is a slice of the positions."""

    def enter(self, x: Tensor) -> Tensor:
        return GatherG.apply(x, 1, self.tp, self.group)  # type: ignore[return-value]

    def leave(self, x: Tensor) -> Tensor:
        return ScatterG.apply(x, 1, self.tp, self.group)  # type: ignore[return-value]

    def norm(self, weight: Tensor) -> Tensor:
        return CopyF.apply(weight, self.group)  # type: ignore[return-value]
