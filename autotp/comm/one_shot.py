"""All-reduces of few bytes in one step: every rank reads the summands of all others through symmetric memory.

A ring sends each byte twice and takes a step for each rank; where bytes are few the steps are what it takes. Here each
rank copies its summand to memory that all of them can read, and adds up all summands itself: one kernel, one wait.
`FORMS` has, for the conversions that are a sum over ranks, those that do it so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.ir.specs import Spec

from . import collectives, conversions

MAX_BYTES = 1 << 18  # bytes: more of them take longer to be read by all than to go round
ALIGNED_BYTES = 16  # bytes that the kernel reads together
KINDS = (torch.float32, torch.bfloat16)  # those that it adds up

_LIBRARY = torch.library.Library("autotp", "FRAGMENT")
_LIBRARY.define("one_shot_all_reduce(Tensor x, int tp, str group) -> Tensor")


def summed(x: Tensor, tp: int, group: str) -> Tensor:
    """The sum over ranks, in one step where there is symmetric memory for it; by the usual all-reduce elsewhere.

    Args:
        x: this rank's summand. tp: number of ranks. group: name of the process group.
    """
    x = x.contiguous()
    fits = 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNED_BYTES == 0 and x.dtype in KINDS
    room = compat.symmetric_room(group, MAX_BYTES, x.device) if fits else None
    if room is None:
        return collectives.real("all_reduce", x, "sum", tp=tp, group=group)
    return compat.one_shot_sum(room[: x.nbytes].view(x.dtype).view(x.shape), x, group)


_LIBRARY.impl("one_shot_all_reduce", summed, "CompositeExplicitAutograd")
torch.library.register_fake("autotp::one_shot_all_reduce", lambda x, tp, group: torch.empty_like(x), lib=_LIBRARY)
_OPERATORS: Any = torch.ops.autotp


def _sum(x: Tensor, tp: int, group: str) -> Tensor:
    return _OPERATORS.one_shot_all_reduce(x, tp, group)


class _ToInvariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: int, group: str) -> Tensor:
        return _sum(x, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None


class _ToReplicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: int, group: str) -> Tensor:
        ctx.how = tp, group
        return _sum(x, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ToReplicate.apply(grad, *ctx.how), None, None  # type: ignore[return-value]


def f_star(x: Tensor, src: Spec, dst: Spec, *, rank: int, tp: int, group: str) -> Tensor:
    """The conversion f* in one step; arguments as `conversions.f_star`."""
    if tp == 1 or src.reduction != "sum":
        return conversions.f_star(x, src, dst, rank=rank, tp=tp, group=group)
    return _ToInvariant.apply(x, tp, group)  # type: ignore[return-value]


def all_reduce(x: Tensor, src: Spec, dst: Spec, *, rank: int, tp: int, group: str) -> Tensor:
    """A sum that stays a replica, in one step; arguments as `conversions.all_reduce`."""
    if tp == 1 or src.reduction != "sum":
        return conversions.all_reduce(x, src, dst, rank=rank, tp=tp, group=group)
    return _ToReplicate.apply(x, tp, group)  # type: ignore[return-value]


FORMS = {conversions.f_star: f_star, conversions.all_reduce: all_reduce}
