"""A sharded module's parts are of the original's classes; what is set on them is heeded, or refused at that moment."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import autotp
from autotp.errors import StateError
from autotp.runtime import programs
from tests.helpers.compare import mesh_of
from tests.helpers.models import redrawn


class Scaled(nn.Module):
    """Attributes of every kind that a forward may read."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 8)
        self.scales, self.config, self.activation = [1.0, 2.0], SimpleNamespace(shift=0.0), torch.relu
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.activation(self.up(x))))
        return (self.down(hidden) * self.scales[0] + self.config.shift) * self.factor + self.mean


def within_scales(m: Any) -> None:
    m.scales[0] = 3.0


def within_config(m: Any) -> None:
    m.config.shift = 2.0


SETTINGS: dict[str, Any] = {
    "norm.eps": lambda m: setattr(m.norm, "eps", 1.0),
    "a class attribute": lambda m: setattr(m, "factor", 3.0),
    "a function": lambda m: setattr(m, "activation", torch.tanh),
    "within a list": within_scales,
    "within the config": within_config,
    "a list": lambda m: setattr(m, "scales", [5.0]),
    "a buffer": lambda m: setattr(m, "mean", torch.ones(8)),
    "drop.p": lambda m: setattr(m.drop, "p", 1.0),
    "on every layer": lambda m: [setattr(q, "p", 1.0) for q in m.modules() if isinstance(q, nn.Dropout)],
}


@torch.no_grad()
def settings(tp: Any, **mesh: Any) -> dict[str, Any]:
    """After each setting: the largest difference from the model, and whether it did anything."""
    torch.manual_seed(0)
    model: Any = redrawn(Scaled())
    x = torch.randn(4, 8)
    sharded: Any = autotp.compile(model, tp, example_inputs=x, **mesh)
    found: dict[str, Any] = {}
    for name, change in SETTINGS.items():
        before = sharded(x)
        for m in (model, sharded):
            change(m)
        after = sharded(x)
        found[name] = float((after - model(x)).abs().max()), bool((after - before).abs().max() > 1e-2)
    for m in (model, sharded):
        m.drop.p, m.norm.eps = 0.0, 1e-5
    programs = len(sharded._programs_made)
    sharded.norm.eps = 1e-5
    found["back"] = float((sharded(x) - model(x)).abs().max()), True
    twin = copy.deepcopy(sharded)
    twin.norm.eps = 1.0
    found["a copy"] = float((sharded(x) - model(x)).abs().max()), bool((twin(x) - sharded(x)).abs().max() > 1e-2)
    return found | {"programs": programs}


def check_settings(found: dict[str, Any]) -> None:
    assert found.pop("programs") == len(SETTINGS) - 1  # a buffer is no attribute; p was 1 on every layer before
    silent = found.pop("on every layer")
    assert silent[0] < 1e-5
    for name, (difference, changed) in found.items():
        assert difference < 1e-5 and changed, (name, found)


def test_what_is_set_after_compile_does_what_it_does_on_the_original():
    check_settings(settings(1))


def on_two(rank: int, world: int, group: Any) -> dict[str, Any]:
    return settings(None, mesh=mesh_of(group))


def test_on_two_ranks_too(pool):
    for found in pool.run(on_two, world=2):
        check_settings(found)


def test_programs_of_ever_other_values_are_let_go(monkeypatch):
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    for eps in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        for m in (model, sharded):
            m[1].eps = eps
        assert torch.equal(sharded(x), model(x)), eps
        tables = [sharded._programs_made, *(m._programs for m in sharded.modules())]
        assert max(map(len, tables)) == 2
        known = [program for kind in sharded._programs_made.kinds.values() for program, _ in kind.programs]
        assert {*map(id, known)} <= {*map(id, sharded._programs_made)}
    assert [each.changes[0][2] for each in sharded._programs_made] == [
        "('float', '1.0')",
        "('float', '2.0')",
    ]  # 3.0 has not run for longest
    assert sharded._programs_made.total == 5


class Wrapping(nn.Module):
    def __init__(self, inner: nn.Module, width: int = 0) -> None:
        super().__init__()
        self.inner, self.adapter = inner, nn.Linear(width, width) if width else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


REFUSED: dict[str, tuple[Any, str]] = {
    "a layer": (lambda s: setattr(s, "up", nn.Linear(8, 16)), "up of this Scaled: Linear cannot take"),
    "an adapter": (
        lambda s: setattr(s, "up", Wrapping(s.up, 8)),
        "tensors of its own around the layer, such as adapter",
    ),
    "no layer": (lambda s: setattr(s, "drop", None), "NoneType cannot take"),
    "one deleted": (lambda s: delattr(s, "drop"), "cannot be deleted"),
    "another layer's": (lambda s: s.add_module("up", s.down), "Linear cannot take"),
    "another shape": (
        lambda s: setattr(s.up, "weight", nn.Parameter(torch.ones(3))),
        "weight of up .Linear.: this has",
    ),
    "no bias": (lambda s: setattr(s.up, "bias", None), "bias of up .Linear.: this is NoneType"),
    "a buffer": (lambda s: setattr(s, "mean", torch.ones(3)), "mean of this Scaled: the program takes"),
    "an attribute": (lambda s: delattr(s, "activation"), "activation of this Scaled: it cannot be deleted"),
}


def test_what_cannot_be_heeded_is_refused_at_that_moment():
    torch.manual_seed(0)
    model: Any = redrawn(Scaled())
    x = torch.randn(4, 8)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    for name, (change, text) in REFUSED.items():
        with pytest.raises(StateError, match=text):
            change(sharded)
        assert torch.equal(sharded(x), model(x)), name
    up = sharded.up
    sharded.up = Wrapping(up)
    assert torch.equal(sharded(x), model(x))
    sharded.up = up
    for m in (model, sharded):
        m.up.weight = nn.Parameter(m.up.weight.detach() * 2)
    assert torch.equal(sharded(x), model(x))
    sharded._modules["up"] = nn.Linear(8, 16)  # as some libraries do it
    with pytest.raises(StateError, match="Linear cannot take"):
        sharded(x)


def test_libraries_that_put_other_layers_in_are_refused_at_that_moment():
    model, x = redrawn(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))), torch.randn(4, 8)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    adapters = LoraConfig(target_modules=["0"])
    with pytest.raises(StateError, match="0 of this Sequential: Linear has tensors of its own .* such as lora_A"):
        inject_adapter_in_model(adapters, sharded)
    with pytest.raises(StateError, match="1 of this Sequential: SyncBatchNorm cannot take a layer's place"):
        nn.SyncBatchNorm.convert_sync_batchnorm(sharded)
    assert torch.equal(sharded(x), model(x))


class Register(nn.Module):
    """A class that counts what derives from it, makes itself oddly, and does more in a call than its forward."""

    known: list[str] = []

    def __init_subclass__(cls) -> None:
        Register.known.append(cls.__name__)

    def __new__(cls, width: int = 8) -> Any:
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_parts_are_of_the_originals_classes():
    torch.manual_seed(0)
    attention, last = nn.MultiheadAttention(8, 2), nn.GRU(8, 8)
    model: Any = Chain(nn.Linear(8, 8), nn.ModuleList([nn.ReLU()]), Register(8), attention, last)
    x = torch.randn(4, 8)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    for part, original in zip(sharded.modules(), [sharded, *list(model.modules())[1:]], strict=True):
        assert isinstance(part, type(original)) and type(part).__name__ == type(original).__name__
    linear, kinds, register = sharded[0], sharded[1], sharded[2]
    assert (linear.in_features, linear.out_features, sharded[3].num_heads) == (8, 8, 2)
    assert len(kinds) == 1 and isinstance(kinds[0], nn.ReLU) and isinstance(kinds[:1], nn.ModuleList)
    assert Register.known == [] and isinstance(register, Register)
    assert torch.equal(sharded(x), model(x))
    assert type(type(linear)(3, 4)) is nn.Linear  # a new layer of that kind
    assert not hasattr(linear, "nothing") and torch.equal(copy.deepcopy(sharded)(x), sharded(x))


class Chain(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return self[2](self[0](input))


class Overridden(nn.Module):
    """Instances have values of their own where the class has defaults."""

    steps: list[float] = []
    factor, none = 1.0, cast(Any, None)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.factor, self.none = nn.Linear(4, 4), [2.0], 3.0, 5.0
        self.said = {"itself alone": object()}

    def forward(self, x: Tensor) -> Tensor:
        assert self.said
        return self.layer(x) * self.factor + sum(self.steps)


def test_an_instances_value_comes_before_its_classs():
    torch.manual_seed(0)
    model, x = nn.Sequential(Overridden()), torch.randn(2, 4)
    sharded: Any = autotp.compile(model, 1, example_inputs=x)
    part: Any = sharded[0]
    assert (part.factor, part.none, part.steps, list(part.said)) == (3.0, 5.0, [2.0], ["itself alone"])
    lists: Any = model[0].steps, part.steps
    for steps in lists:
        steps.append(7.0)
    assert Overridden.steps == [] and torch.equal(sharded(x), model(x))
    assert len(sharded._programs_made) == 2
    sharded(x)
    assert len(sharded._programs_made) == 2  # an object in a dict is the same one still


class Partly(nn.Module):
    """Trains its last layer alone, and says so in methods that it overrides; a property is what libraries ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    @property
    def config(self) -> dict[str, int]:
        return {"width": self.first.in_features}

    def parameters(self, recurse: bool = True) -> Any:
        return self.last.parameters(recurse)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.drop.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)))


def whole(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = redrawn(Partly()).train(), torch.randn(4, 8)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    found = {"kind": isinstance(sharded, Partly) and isinstance(sharded, autotp.ShardedModule)}
    found["trained"] = {id(p) for p in sharded.parameters()} == {id(p) for p in sharded.last.parameters()}
    found["mode"] = [m.training for m in sharded.eval().train().modules()] == [m.training for m in model.modules()]
    found["config"] = sharded.config == model.config
    found["outputs"] = torch.allclose(sharded(x), model(x), atol=1e-6)
    state: Any = sharded.full_state_dict()  # type: ignore[operator]
    found["weights"] = all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    return found


def test_a_sharded_module_has_what_its_originals_class_overrides(pool):
    for found in pool.run(whole, world=2):
        assert all(found.values()), found
