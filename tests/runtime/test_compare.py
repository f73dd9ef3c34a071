"""`compare=`: what is equal passes, and of what is broken on one rank the first module is named, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autotp
from autotp.comm import collectives
from autotp.errors import CompareError, InputError, RankError
from tests.helpers.compare import mesh_of
from tests.helpers.models import inputs_of, transformer

MODES = ("fine", "weight", "values", "gradients", "hook", "stale", "inputs")


class Two(nn.Module):
    """Two layers of other widths, so that their collectives can be told apart."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.drop = nn.Dropout(drop)
        self.second = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).float()


@contextmanager
def broken(rank: int, mode: str) -> Iterator[None]:
    """A collective that gives other numbers on rank 1: forward in the second layer, or backward before the first."""
    plain: Callable[..., Tensor] = collectives.real
    last = {"values": 6, "gradients": 8}.get(mode)  # columns of the value

    def real(primitive: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = plain(primitive, x, *args, **kwargs)
        wrong = rank == 1 and out.shape[-1] == last
        return out * 1.01 if wrong else out

    with patch.object(collectives, "real", real):
        yield


def named(rank: int, world: int, group: Any, mode: str, options: dict[str, Any]) -> list[str]:
    """What a call and its backward say: of what was compared, or the error's text."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 8)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), compare="first", **options)
    if mode == "weight" and rank == 1:
        with torch.no_grad():
            bias = sharded.second[2].bias
            part = bias.to_local() if isinstance(bias, DTensor) else bias
            part.data.add_(0.5)  # past torch's count of writes, by which it would be refused before the call
    if mode == "hook":
        sharded.first.register_forward_hook(lambda m, _, out: out * 1.5)
    if mode == "stale":
        sharded._compared_with.first[1] = nn.ReLU()
    try:
        with broken(rank, mode) if mode == "values" else nullcontext():
            out = sharded(x + rank if mode == "inputs" else x)
        with broken(rank, mode):
            out.square().mean().backward()
    except (CompareError, RankError) as error:
        return [f"{type(error).__name__}: {error}"]
    return list(sharded.compared)


@pytest.fixture(scope="module")
def said(pool) -> dict[str, list[str]]:
    """By mode, what both ranks say, which is the same."""
    found = {}
    for mode in MODES:
        one, other = pool.run(named, mode, {}, world=2)
        assert one == other
        found[mode] = one
    return found


def test_what_is_equal_passes(said):
    values, gradients = said["fine"]
    assert values.startswith("compare: ") and "values of this call are the original's within 1.2e-04" in values
    assert "the gradients of" in gradients


@pytest.mark.parametrize(
    ("mode", "texts"),
    [
        ("weight", ("the values of second.2 (its parameter second.2.bias)", "rank 0: equal, rank 1: off by")),
        ("values", ("the values of second.2 (linear_3 = aten.linear, after f_star)", "rank 0: equal, rank 1: off by")),
        ("gradients", ("the gradients of", "rank 0: equal, rank 1: off by", "a collective gave other numbers")),
        ("hook", ("the values of first (by what it gives; so output 0)", "hooks, wrappers", "ranks 0-1: off by")),
        ("stale", ("the values of first.1 ", "captured of the model", "ranks 0-1: off by")),
    ],
)
def test_the_first_module_that_differs_is_named(said, mode, texts):
    (error,) = said[mode]
    assert error.startswith("CompareError: compare: ") and all(text in error for text in texts), error
    assert "rounding in float32 allows 1.2e-04" in error


def test_other_inputs_on_a_rank_are_no_difference_of_the_module(said):
    assert "RankError" in said["inputs"][0] and "values of input 0" in said["inputs"][0]


def step(sharded: Any, x: Tensor) -> None:
    out = sharded(x)
    if out.requires_grad:
        out.square().mean().backward()


def kinds(rank: int, world: int, group: Any) -> dict[str, list[str]]:
    """What is compared of sound modules, in many ways to call them."""
    found: dict[str, list[str]] = {}

    def module(drop: float = 0.0, **options: Any) -> Any:
        torch.manual_seed(0)
        options = {"example_inputs": torch.randn(4, 8), "compare": "every", **options}
        return autotp.compile(Two(drop), mesh=mesh_of(group), **options)

    x, sharded = torch.randn(4, 8), module()
    for _ in range(2):  # gradients add up
        step(sharded, x)
    sharded.first.requires_grad_(False)
    step(sharded, torch.randn(7, 8))
    with torch.no_grad():
        step(sharded.eval(), x)
    found["every"] = list(sharded.compared)
    first = module(compare="first")
    for _ in range(3):
        step(first, x)
    found["first"] = list(first.compared)
    for name, options in (("counter", {}), ("torch", {"random": "torch"})):
        drawn = module(0.5, **options).train()
        torch.manual_seed(5)
        step(drawn, x)
        after = torch.rand(1)
        torch.manual_seed(5)
        plain = module(0.5, compare=None, **options).train()
        torch.manual_seed(5)
        step(plain, x)
        assert torch.equal(after, torch.rand(1))  # who compares draws no more
        assert all(torch.equal(g, plain.full_grad_dict()[n]) for n, g in drawn.full_grad_dict().items())
        found[name] = list(drawn.compared)
    half = module()
    with torch.autocast("cpu", torch.bfloat16):
        out = half(x)
    out.square().mean().backward()
    found["autocast"] = list(half.compared)
    late = module(example_inputs=None)
    step(late, x)
    found["late"] = list(late.compared)
    step(copy.deepcopy(late), x)
    scored = module(
        loss=nn.functional.cross_entropy, outputs="loss", example_inputs={"x": x, "targets": torch.arange(4)}
    )
    scored(x, targets=torch.arange(4)).backward()
    found["loss"] = list(scored.compared)
    return found


def test_what_is_sound_passes_however_it_is_called(pool):
    one, other = pool.run(kinds, world=2)
    assert one == other
    assert [len(one[name]) for name in ("every", "first", "counter", "torch", "autocast", "late", "loss")] == [
        7, 2, 2, 2, 2, 2, 2,
    ]  # fmt: skip
    assert "its graph was run with the module's" in one["counter"][0] and "its graph" not in one["torch"][0]
    assert all("(bfloat16)" in line for line in one["autocast"])


class Counting(nn.Module):
    """Writes to buffers and to its input; the bias before the norm has no gradient but for rounding."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        inner = self.down(torch.relu(self.up(x.add_(1))))
        return {"y": self.norm(inner * self.calls), "inner": inner}


def counting(rank: int, world: int, group: Any) -> tuple[str, ...]:
    torch.manual_seed(0)
    model, x = Counting().train(), torch.randn(6, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), compare="every")
    for _ in range(2):
        out = sharded(x.clone())["y"]  # the other output is read within the model too
        (out * torch.arange(96).cos().view(6, 16)).sum().backward()
    assert sharded.calls == 2
    return sharded.compared


def test_buffers_and_inputs_that_are_written(pool):
    assert [len(said) for said in pool.run(counting, world=2)] == [4, 4]


def transformers_step(rank: int, world: int, group: Any, name: str, options: dict[str, Any]) -> list[str]:
    model: Any = transformer(f"{name}-short")
    inputs = inputs_of(model)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), compare="first", **options)
    sharded(**inputs).logits.float().square().mean().backward()
    return list(sharded.compared)


@pytest.mark.parametrize(
    ("name", "options"), [("llama-tied", {"sequence_parallel": True}), ("gpt2", {}), ("llama-uneven", {})]
)
def test_models_of_transformers(pool, name, options):
    for said in pool.run(transformers_step, name, options, world=2):
        assert len(said) == 2 and all(int(line.split(" values")[0].split()[-1]) > 50 for line in said)


def beside_tp(rank: int, world: int, group: Any, axis: str, mode: str) -> list[str]:
    """What a step over another axis and tp says: with the loss inside, of rows of which more count on one slice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "tp"))
    model: Any = transformer("llama-short")
    ids = torch.arange(64).view(4, 16) % 30
    labels = ids.masked_fill(torch.arange(64).view(4, 16) < 9, -100)
    place = mesh[axis].get_local_rank()
    rows = {k: v.chunk(2)[place] if axis == "dp" else v for k, v in {"input_ids": ids, "labels": labels}.items()}
    if axis == "cp" and mode == "parts":
        rows = dict(autotp.Inputs(**rows).part(place, 2).kwargs)
    options: dict[str, Any] = {"fully_shard": True} if mode == "split" else {}
    sharded: Any = autotp.compile(model, mesh, example_inputs=rows, compare="every", **options)
    if mode == "weight" and rank == 3:
        sharded.model.norm.weight.to_local().data.add_(0.5)
    if mode == "stale":
        sharded._compared_with.model.layers[0].mlp.act_fn = nn.ReLU()
    if mode == "sum":  # another summand of one slice
        scale = 1.1 if rank > 1 else 1.0
        sharded.model.norm.register_forward_hook(lambda m, _, out: out.register_hook(lambda g: g * scale) and None)
    try:
        for _ in range(2):  # gradients add up
            sharded(**rows).loss.backward()
    except CompareError as error:
        return [str(error)]
    return list(sharded.compared)


@pytest.mark.parametrize(("axis", "mode"), [("dp", "fine"), ("dp", "split"), ("cp", "fine"), ("cp", "parts")])
def test_slices_and_parts_of_sequences_pass(pool, axis, mode):
    one, *others = pool.run(beside_tp, axis, mode)
    assert len(one) == 4 and all(other == one for other in others)


@pytest.mark.parametrize(
    ("axis", "mode", "text"),
    [
        ("dp", "weight", "the values of model.norm (its parameter model.norm.weight)"),
        ("cp", "weight", "the values of model.norm (its parameter model.norm.weight)"),
        ("cp", "stale", "captured of the model"),
        ("dp", "stale", "captured of the model"),
        ("dp", "sum", "the gradients of model.norm (its parameter model.norm.weight)"),
    ],
)
def test_what_differs_over_another_axis_is_named(pool, axis, mode, text):
    one, *others = pool.run(beside_tp, axis, mode)
    assert len(one) == 1 and text in one[0] and all(other == one for other in others), one


class Chosen(nn.Module):
    """A module that computes a truth value of the shape of what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, -2 * x)


def test_a_truth_value_of_the_same_shape_is_another_value():
    x = torch.randn(4, 8)
    model: Any = autotp.compile(nn.Sequential(Chosen(), nn.Linear(8, 8)), 1, example_inputs=x, compare="first")
    model(x)
    assert "values of this call are the original's" in model.compared[0]


def test_what_cannot_be_compared_is_refused():
    x = torch.randn(4, 8)
    for wrong in ("always", True, 1, []):
        with pytest.raises(InputError, match="choose None, 'first' or 'every'"):
            autotp.compile(Two(), 1, example_inputs=x, compare=wrong)  # type: ignore[arg-type]
    refused: tuple[dict[str, Any], ...] = ({"outputs": "sharded"}, {"precision": "float8"})
    for options, why in zip(refused, ("compares whole outputs", "a difference of one rounding"), strict=True):
        with pytest.raises(InputError, match=f"compare=.*{why}"):
            autotp.compile(Two(), 2, example_inputs=x, compare="first", **options)
    alone: Any = autotp.compile(Two(), 1, example_inputs=x, compare="every")
    step(alone, x)
    assert len(alone.compared) == 2
