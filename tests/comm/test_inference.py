"""Conversions where no gradient is recorded."""

from __future__ import annotations

import torch

from autotp.comm import conversions as cv
from autotp.ir.specs import INVARIANT, REPLICATED, ShardSpec


def test_without_gradients_nothing_is_recorded_nor_copied():
    """In inference f gives the value itself, and no result is a view that may not be written to."""
    x = torch.arange(4.0)
    spec = ShardSpec(0, 1, ((4, 1),))
    with torch.no_grad():
        same, part = (
            cv.f(x, INVARIANT, REPLICATED, rank=0, tp=2, group=""),
            cv.shard(x, INVARIANT, spec, rank=1, tp=2, group=""),
        )
    assert same is x and part.tolist() == [2.0, 3.0] and not part._is_view()
    part.add_(torch.ones(2, requires_grad=True))
    recorded = cv.f(x.clone().requires_grad_(), INVARIANT, REPLICATED, rank=0, tp=2, group="")
    assert part.requires_grad and recorded.grad_fn is not None
