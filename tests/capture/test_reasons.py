"""What a trace would see otherwise than a call does, or not at all: captured as the model is, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError, InputError

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A linear layer, and a buffer with a name that graph modules have for themselves."""

    code: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)
        self.register_buffer("code", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return self.up(x)


class Typed(Net):
    """Asks for the very type, which for a fake tensor is another."""

    def forward(self, x: Tensor) -> Any:
        given = 2.0 if type(x) is torch.Tensor else 1.0
        held = 3.0 if type(self.up.weight) is nn.Parameter and isinstance(type(x), type) else 1.0
        return self.up(x) * given * held


class Distributed(Net):
    """Its arguments are checked by value."""

    def forward(self, x: Tensor) -> Any:
        mean = self.up(x)
        return torch.distributions.Normal(mean, F.softplus(mean) + 0.1).log_prob(x)


class Coded(Net):
    def forward(self, x: Tensor) -> Any:
        self.code.view(-1)[:2].mul_(3)  # traced twice
        return self.up(x) * self.code


class Normed(Net):
    """The old weight norm keeps a computed weight in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(nn.Linear(8, 8))
        self(X)


class Dilated(Net):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.dilation, self.up = place + 1, nn.Linear(8, 8 + place)

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.up(x))[..., :8] * self.dilation


class Pyramid(nn.Module):
    """A stack of blocks that are not alike, and of which each reads its place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.levels = nn.ModuleList(Dilated(i) for i in range(4))

    def forward(self, x: Tensor) -> Any:
        for level in self.levels:
            x = x + level(x)
        return x


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [Typed, Distributed, Coded, Normed, Pyramid])
def test_it_is_captured_as_it_is_called(kind):
    torch.manual_seed(0)
    model, sharded = kind(), None
    sharded = autotp.compile(model, 1, example_inputs=X, check_capture=False)
    torch.testing.assert_close(sharded(X), model(X), rtol=0, atol=0)
    assert autotp.verify(model, 2, X)


class Causal(Net):
    def forward(self, x: Tensor) -> Any:
        q = self.up(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5 if self.training else 0.0)


def test_causal_attention_drops_weights_at_every_length(captured_once):
    sharded: Any = autotp.compile(Causal(), 1, example_inputs=X)
    for length in (6, 3):
        y = sharded(X[:, :length])
        assert y.shape[2] == length
        first = Causal().eval()(X[:, :length])[:, :, 0]  # sees itself alone: all of it or nothing
        kept = (y[:, :, 0] / first).unique()
        torch.testing.assert_close(kept[kept.abs() > 1], torch.full_like(kept[kept.abs() > 1], 2.0))
    assert autotp.verify(Causal(), 2, X)


class Hooks(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y


class Cond(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (self.up(x),))


class Force(Net):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.up(x).square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("kind", "told", "way_out"),
    [
        (Hooks, "y.register_hook(", "by a torch.autograd.Function"),
        (Cond, "takes a function", "torch.where in place of torch.cond"),
        (Force, "torch.autograd.grad(self.up(x)", "Return what it is the gradient of"),
    ],
)
def test_it_is_refused_with_the_way_out(kind, told, way_out):
    with pytest.raises(CaptureError) as caught:
        autotp.plan(kind(), 2, example_inputs=X, check_capture=False)
    assert told in str(caught.value) and way_out in str(caught.value)


def test_a_gradient_is_taken_outside_as_the_way_out_says():
    model, outside = Force(), Net()
    sharded: Any = autotp.compile(outside, 1, example_inputs=X.clone().requires_grad_())
    x = X.clone().requires_grad_()
    (force,) = torch.autograd.grad(sharded(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(force, model(X), rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(y.square().sum(), list(m.parameters()), allow_unused=True)
        for y, m in ((force, sharded), (model(X), model))
    ]
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-4)


class Rescaled(Net):
    """Halves its weight in the first call in eval mode."""

    scaled = False

    def forward(self, x: Tensor) -> Any:
        if not self.training and not self.scaled:
            with torch.no_grad():
                self.up.weight.div_(2)
            self.scaled = True
        return self.up(x)


def test_weights_that_the_forward_rescales_are_rescaled_before():
    model = Rescaled().eval()
    with pytest.raises(CaptureError, match=r"writes to the parameter up.weight(.|\n)*has done it after that call"):
        autotp.plan(model, 2, example_inputs=X)
    wanted = model(X)
    torch.testing.assert_close(autotp.compile(model, 1, example_inputs=X)(X), wanted)
    assert autotp.verify(model, 2, X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
def test_scripted_modules_are_refused_and_their_functions_are_not():
    part, rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)
    scripted = torch.jit.script(part)
    for model, what in ((scripted, "the model, a Sequential,"), (nn.Sequential(rest, scripted), "1, a Sequential,")):
        with pytest.raises(CaptureError, match=f"{what} is TorchScript.*without torch.jit, and load the same"):
            autotp.plan(model, 2, example_inputs=X)
    part.load_state_dict(scripted.state_dict())
    assert autotp.verify(nn.Sequential(rest, part), 2, X)


def test_hooks_on_gradients_that_were_there_before_are_refused():
    hooked = Net()
    hooked.up.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(CaptureError, match=r"up.weight has a hook on its gradient.*after compile"):
        autotp.plan(hooked, 2, example_inputs=X)
    hooked = Net()
    hooked.up.register_full_backward_hook(lambda module, to, of: None)
    with pytest.raises(CaptureError, match=r"up has a backward hook.*after compile"):
        autotp.plan(hooked, 2, example_inputs=X)


def test_a_weight_without_a_shape_is_refused():
    lazy = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(InputError, match=r"0.weight has no shape yet.*Call the model once"):
        autotp.plan(lazy, 2, example_inputs=X)
    lazy(X)
    assert autotp.plan(lazy, 2, example_inputs=X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_tensors_that_are_more_than_one_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
    with pytest.raises(CaptureError, match="nested tensor. Pass a padded one"):
        autotp.plan(Net(), 2, example_inputs=nested)
    sharded: Any = autotp.compile(Net(), 1, example_inputs=X)
    for again, what in ((sharded, "gave it"), (nn.Sequential(nn.ReLU(), sharded), "gave its part '1'")):
        with pytest.raises(InputError, match=f"sharded already.*{what}"):
            autotp.plan(again, 2, example_inputs=X)
