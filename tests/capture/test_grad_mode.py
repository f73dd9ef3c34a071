"""A forward that asks whether gradients are recorded has a program for each answer; others have one for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

import autotp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Asks(nn.Module):
    """Scales by whether gradients are recorded, here and in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            inside = 3.0 if torch.is_grad_enabled() else 1.0
        return self.up(x) * (2.0 if torch.is_grad_enabled() else inside)


class Inference(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * (2.0 if torch.is_inference_mode_enabled() else 1.0)


class Named(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * (2.0 if is_grad_enabled() else 1.0)


class Never(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_each_grad_mode_is_the_models():
    for kind, programs in ((Asks, 3), (Inference, 3), (Named, 3), (Never, 1)):
        for first in (torch.enable_grad, torch.no_grad):
            model: Any = kind()
            with first():
                sharded: Any = autotp.compile(model, 1, example_inputs=X)
            for _ in range(2):
                for context in (first, torch.inference_mode, torch.no_grad, torch.enable_grad):
                    with context():
                        assert torch.equal(sharded(X), model(X)), (kind, first, context)
            assert len(sharded._programs_made) == programs
