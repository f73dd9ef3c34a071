"""Loops over experts that are written by hand: what skips an expert without tokens, and experts that there are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from autotp.errors import CaptureError
from tests.helpers.cases.capture_cases import WIDTH, Experts, X

TOKENS = (X, X[:1], torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1)))  # one token leaves experts out


class Skips(Experts):
    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, weight in enumerate(self.experts):
            rank, token = torch.where(mask[expert])
            if token.shape[0] == 0:
                continue
            out.index_add_(0, token, (x[token] @ weight) * scores[token, rank, None])
        return out


class Asks(Experts):
    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, weight in enumerate(self.experts):
            chosen = mask[expert].bool()
            if chosen.any():
                out = out + (x @ weight) * torch.where(chosen, scores.T, 0).sum(0)[:, None]
        return out


class Beyond(Experts):
    """Has a class more, of tokens for which there is no expert."""

    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), torch.cat([mask, torch.zeros_like(mask[:1])])
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            rank, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, (x[token] @ self.experts[expert[0]]) * scores[token, rank, None])
        return out


@pytest.mark.parametrize("kind", [Skips, Asks])
def test_experts_that_are_skipped_are_refused_with_the_way_out(kind):
    with pytest.raises(CaptureError, match=r"(?s)test_skips.py:\d+.*an expert without tokens\) may be left out"):
        autotp.plan(kind(), 2, example_inputs=X)


class Plain(Experts):
    """`Skips` without the line, as the way out says."""

    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, weight in enumerate(self.experts):
            rank, token = torch.where(mask[expert])
            out.index_add_(0, token, (x[token] @ weight) * scores[token, rank, None])
        return out


@pytest.mark.parametrize(("kind", "note"), [(Plain, ""), (Beyond, "running over all indices")])
def test_experts_without_tokens_compute_on_none(kind, note):
    model = kind()
    sharded: Any = autotp.compile(model, 1, example_inputs=X)
    assert note in " ".join(sharded.plan.notes)
    for x in TOKENS:
        torch.testing.assert_close(sharded(x), model(x))
    assert autotp.verify(model, 2, X)
