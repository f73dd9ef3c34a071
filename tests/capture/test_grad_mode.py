"""Whether gradients are recorded: a forward that asks has a program for each answer, others one for all; and what is
computed and written under `torch.no_grad` carries no gradient, however often the graph is traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.variables.torch  # where its tables are
from torch import Tensor, is_grad_enabled, nn

import autotp
from autotp import compat
from autotp.capture.export import GradModeAnswers
from autotp.capture.request import GRAD
from autotp.errors import CaptureError

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


class AsksInference(Asks):
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
    for kind, programs in ((Asks, 3), (AsksInference, 3), (Named, 3), (OfTensors, 3), (Never, 1)):
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


class Net(nn.Module):
    """A linear layer and two buffers."""

    u: Tensor
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)
        self.register_buffer("u", torch.randn(8))
        self.register_buffer("c", torch.ones(8))


class PowerIteration(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(self.up.weight @ self.u)
        return self.up(x) * self.u


class Average(Net):
    """In a function of its own, in several steps, and of a value of this call."""

    @torch.no_grad()
    def update(self, y: Tensor) -> None:
        self.u.mul_(0.9).add_(self.up.weight.mean(0), alpha=0.1)
        self.c[:4] = y[0, :4]

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.update(y)
        return y * self.u + self.c


class Out(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mv(self.up.weight, self.u, out=self.c)
            torch.mv(self.up.weight.t(), self.c, out=self.u)
        return self.up(x) * self.u + self.c


class Spectral(nn.Module):
    """Both of torch's spectral norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
        self.down = nn.utils.spectral_norm(nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Beside(Net):
    """A region that writes nothing, beside what has to be traced twice."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.up(x).sigmoid()
        y = self.up(x) * 1
        y.view(-1)[:3].mul_(2)
        return y * gate


class Vmapped(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.up(x).sigmoid()
        return torch.vmap(lambda row: row @ self.up.weight)(x) * gate


class Autocast(Net):
    """Torch's export forgets a region that lies within autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                gate = self.up(x).sigmoid()
            y = self.up(x)
        return (y * gate).float()


class Inference(Net):
    @torch.inference_mode()
    def shift(self, x: Tensor) -> Tensor:
        return self.up(x).sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + self.shift(x)


KINDS = (PowerIteration, Average, Out, Spectral, Beside, Vmapped, Autocast, Inference)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_self_check_the_gradients_are_the_models(kind):
    model: Any = kind()
    sharded: Any = autotp.compile(copy.deepcopy(model), 1, example_inputs=X, check_capture=False)
    for _ in range(2):
        found, wanted = sharded(X), model(X)
        assert torch.equal(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
    gradients, state = sharded.full_grad_dict(), sharded.full_state_dict()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() <= gradients.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert autotp.verify(kind(), 2, X)


class Changed(Net):
    """The gradient of what is written to is as if nothing had been."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.no_grad():
            y.mul_(2)
        return y * x


class Through(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 1
        y.detach()[:, 0].mul_(2)
        return y * x


class Data(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.up(x).data.mean()


@pytest.mark.parametrize(
    ("kind", "line", "way_out"),
    [(Changed, "y.mul_(2)", "leaves the gradient"), (Through, ".mul_(2)", "a copy"), (Data, "", "reads `.data`")],
)
def test_what_no_operator_says_is_refused(kind, line, way_out):
    with pytest.raises(CaptureError) as caught:
        autotp.plan(kind(), 2, example_inputs=X, check_capture=False)
    assert line in str(caught.value) and way_out in str(caught.value)
