"""What is computed and written under `torch.no_grad` carries no gradient, however often the graph is traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


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
