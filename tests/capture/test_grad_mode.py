"""A forward that asks whether gradients are recorded has a program for each answer; others have one for all."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.variables.torch  # where its tables are
from torch import Tensor, is_grad_enabled, nn

import autotp
from autotp import compat
from autotp.capture.export import GradModeAnswers
from autotp.capture.request import GRAD

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


class OfTensors(Asks):
    """Asks what it computed, and what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y * (2.0 if y.requires_grad else 1.0) + (3.0 if x.requires_grad else 0.0)


def test_each_grad_mode_is_the_models():
    for kind, programs in ((Asks, 3), (Inference, 3), (Named, 3), (OfTensors, 3), (Never, 1)):
        for first in (torch.enable_grad, torch.no_grad):
            model: Any = kind()
            with first():
                sharded: Any = autotp.compile(model, 1, example_inputs=X)
            for _ in range(2):
                for context in (first, torch.inference_mode, torch.no_grad, torch.enable_grad):
                    with context():
                        assert torch.equal(sharded(X), model(X)), (kind, first, context)
            assert len(sharded._programs_made) == programs


def test_what_is_trained_counts_where_tensors_are_asked():
    graded = X.clone().requires_grad_()
    for kind, programs in ((OfTensors, 4), (Never, 2)):  # an input with a gradient is another program in any case
        model: Any = kind()
        sharded: Any = autotp.compile(model, 1, example_inputs=X)
        for trained in (True, False, True):
            for each in (model, sharded):
                each.requires_grad_(trained)
            for x in (X, graded):
                assert torch.equal(sharded(x), model(x)), (kind, trained, x.requires_grad)
        assert len(sharded._programs_made) == programs


def test_dynamo_knows_torch_after_a_capture():
    """Its tables may be made while a capture stands in for functions of torch."""
    tables = compat.running._tables()
    for table in tables:
        table.cache_clear()
    with GradModeAnswers(GRAD).answered():
        for table in tables:
            table()
    step = torch.compile(lambda x: x + 1 if torch.is_grad_enabled() else x, backend="eager", fullgraph=True)
    assert torch.equal(step(torch.zeros(2)), torch.ones(2))
