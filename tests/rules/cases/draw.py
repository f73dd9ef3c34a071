"""Random operands of small sizes, and cases made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autotp import compat
from autotp.proof.case import Case

aten: Any = torch.ops.aten
_draw = torch.Generator().manual_seed(0)
REFUSED: list[Case] = []  # by this torch itself; a test holds that it does


def f(*shape: int) -> Tensor:
    """Random float64."""
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def pos(*shape: int) -> Tensor:
    """Random float64 in (0.1, 0.9)."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=_draw)


def cplx(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_draw)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_draw) < 0.5


def whole(*shape: int) -> Tensor:
    """-1, 0 and 1 as bfloat16: sums up to 256 are exact."""
    return (ints(3, *shape) - 1).bfloat16()


def narrow(*shape: int) -> Tensor:
    """-1, 0 and 1 as float8, in memory row by row: sums of products are exact."""
    return (ints(3, *shape) - 1).float().to(torch.float8_e4m3fn)


def case(target: Any, *args: Any, **kwargs: Any) -> Case:
    """A case of an overload, or of a packet's default overload."""
    return Case(target if hasattr(target, "_schema") else target.default, args, kwargs)


def frozen(count: int, target: Any, *args: Any, **kwargs: Any) -> Case:
    """A case whose last `count` tensors have no gradient."""
    return replace(case(target, *args, **kwargs), frozen=count)


def since(version: tuple[int, int], *cases: Case) -> list[Case]:
    """Cases that torch computes, on a CPU and under fake tensors, from this version on; before it they are REFUSED."""
    REFUSED.extend(cases if version > compat.VERSION else ())
    return [] if version > compat.VERSION else list(cases)
