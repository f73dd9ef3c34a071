"""The length of a rank's slice of a dimension, and whether ranks hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autotp.ir.runs import Runs


def local_size(runs: Runs, *, rank: int, tp: int) -> int:
    """Elements of a dealt dimension that `rank` owns."""
    return runs.local(rank, tp)


def same(xs: Sequence[Tensor], tol: float = 0.0) -> bool:
    """Whether all ranks hold rank 0's value: to within `tol` times its largest finite magnitude; NaN equals NaN."""
    first = xs[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in xs):
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return all(torch.equal(x, first) for x in xs)
    finite = first[first.isfinite()].abs()
    atol = tol * float(finite.max()) if finite.numel() else 0.0
    return all(torch.allclose(x, first, 0.0, atol, equal_nan=True) for x in xs)
