"""flex_attention with its score and mask functions: captured as what they compute, and split by heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autotp

WIDTH, HEADS, LENGTH = 32, 4, 16
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention with a bias that is learnt for every head and distance, and with a causal mask."""

    def __init__(self, biased: bool, causal: bool, kv: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * 8 * kv), nn.Linear(WIDTH, WIDTH)
        self.biased, self.causal, self.count = biased, causal, kv
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.count, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        score = (lambda s, b, h, i, j: s + self.bias[h, i - j + LENGTH]) if self.biased else None
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, "cpu") if self.causal else None
        y: Any = flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=self.count != HEADS)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("biased", "causal", "kv"), [(True, False, HEADS), (True, True, 2)])
def test_it_splits_by_heads_with_gradients(biased, causal, kv):
    model = Attention(biased, causal, kv)
    report = autotp.verify(model, 2, X)
    assert report and report.plan is not None and not report.forward_only
    split = {p.name for p in report.plan.parameters if p.role != "whole"}
    assert {"q.weight", "kv.weight", "out.weight"} <= split
    assert report.plan.totals.local_flops <= 0.52 * report.plan.totals.flops


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_sharded_forward_is_flex_attention():
    model = Attention(True, True).requires_grad_(False)
    sharded: Any = autotp.compile(model, 1, example_inputs=X)
    torch.testing.assert_close(sharded(X + 1), model(X + 1))
    torch.testing.assert_close(sharded(X[:1]), model(X[:1]))
    assert not torch.allclose(sharded(X), Attention(False, True).requires_grad_(False)(X)), "the negative control"
