"""Random numbers by counters: the same for every degree, split or not, and drawn again the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest
from autotp.driver.compile import capture_model
from autotp.errors import InputError
from autotp.ir.graph import SEEDS, Capture
from autotp.ir.op import packet_of
from autotp.ir.specs import Runs
from autotp.kernels.operators import OPS, mixed
from autotp.passes.decompose import counter_random
from autotp.passes.decompose.counter_random import CountedRandom, seeds
from autotp.proof.run import run
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn, transformer
from tests.helpers.modules.wrapped import Wrapper

P = 0.25
MASK = (1 << 64) - 1


def dropping(name: str, p: float = P) -> Any:
    """A model of one layer in training mode, all of whose dropouts are live."""
    model: Any = transformer(f"{name}-short")
    for key, value in vars(model.config).items():
        if "drop" in key and isinstance(value, float):
            setattr(model.config, key, p)
    torch.manual_seed(0)
    return redrawn(type(model)._from_config(model.config).train()).double()


def splitmix(state: int) -> int:
    """The reference, in Python's integers (Steele, Lea and Flood 2014, figure 19)."""
    z = (state * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_mixing_is_splitmix():
    states = [0, 1, 2, 77, 2**40, 2**62 + 5, -3]
    assert [int(x) & MASK for x in mixed(torch.tensor(states))] == [splitmix(s & MASK) for s in states]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_are_uniform_and_independent(dtype):
    size = [1000, 500]
    x, y = (OPS.counter_uniform(size, torch.tensor(seed), None, 0, size, dtype).double() for seed in (5, 6))
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.mean() - 0.5) < 0.002 and abs(12 * x.var() - 1) < 0.01
    counts = torch.histc(x, 100, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 150  # chi-square of 99 degrees of freedom: 149 in one of a thousand
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x, y)):  # neighbours, and another seed
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.006


def test_dropout_keeps_the_mean_and_the_gradient_has_the_mask():
    x = torch.ones(400, 300, requires_grad=True)
    y = OPS.counter_dropout(x, torch.tensor(1), None, 0, [400, 300], P)
    assert abs(float((y == 0).float().mean()) - P) < 0.005 and abs(float(y.detach().mean()) - 1) < 0.01
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    nothing = OPS.counter_dropout(x.detach(), torch.tensor(1), None, 0, [400, 300], 1.0)
    assert nothing.dtype == x.dtype and not nothing.any()


def test_a_part_is_the_part_of_the_whole():
    seed, whole = torch.tensor(9), [6, 10]
    drawn = OPS.counter_uniform(whole, seed, None, 0, whole, torch.float32)
    place = torch.tensor([1, 2, 7])
    assert torch.equal(OPS.counter_uniform([6, 3], seed, place, 1, whole, torch.float32), drawn[:, place])


def test_seeds_come_from_the_default_generator():
    torch.manual_seed(0)
    first, second, other = seeds(3), seeds(3), seeds(3, place=1)
    torch.manual_seed(0)
    assert torch.equal(seeds(3), first) and not torch.equal(first, second)
    torch.manual_seed(0)
    assert not (seeds(3, place=1) == first).any() and not torch.equal(other, first)


def on_ranks(rank: int, world: int, group: Any, name: str, sequence: bool | None) -> tuple[Tensor, Tensor, float]:
    """Loss and a gradient of two steps with live dropout, the second one with recomputed layers."""
    model = dropping(name)
    inputs, found = inputs_of(model), []
    sharded: Any = autotp.compile(
        model, mesh=mesh_of(group), example_inputs=inputs, sequence_parallel=sequence if world > 1 else None
    )
    torch.manual_seed(5)
    for step in range(2):
        if step:
            layers = sharded.model.layers if name == "llama" else sharded.bert.encoder.layer
            layers[0] = Wrapper(layers[0])
        loss = sharded(**inputs)[0].square().mean()
        loss.backward()
        found.append(loss.detach())
    grads = sharded.full_grad_dict()
    flops = sharded.plan.totals.local_flops / sharded.plan.totals.flops
    return torch.stack(found), grads["model.layers.0.mlp.down_proj.weight" if name == "llama" else
                                     "bert.encoder.layer.0.output.dense.weight"], flops  # fmt: skip


@pytest.mark.parametrize(("name", "sequence"), [("bert", None), ("bert", True), ("llama", None)])
def test_the_masks_do_not_depend_on_the_degree(pool, name, sequence):
    runs = {tp: pool.run(on_ranks, name, sequence, world=tp)[0] for tp in (1, 2, 4)}
    losses, grad, _ = runs[1]
    assert losses[0] != losses[1]  # another seed for each forward
    close = 1e-6 if name == "llama" else 1e-10  # transformers takes a llama's norms in float32
    for tp in (2, 4):
        assert difference(runs[tp][0], losses) < close and difference(runs[tp][1], grad) < close, tp
        assert runs[tp][2] < 1.1 / tp  # and attention is split, with its weights dropped


def forgetful(rank: int, world: int, group: Any) -> tuple[Tensor, Tensor]:
    """Losses right, and where every rank draws what the first one draws."""
    right = on_ranks(rank, world, group, "bert", None)[0]
    with patch.object(Runs, "spans", lambda self, rank, tp: [(0, self.length // tp)]):
        return right, on_ranks(rank, world, group, "bert", None)[0]


def test_a_rank_that_forgets_its_place_is_noticed(pool):
    """The negative control."""
    right, wrong = pool.run(forgetful, world=2)[0]
    assert difference(wrong, right) > 1e-3


def replaying(rank: int, world: int, group: Any) -> tuple[float, float]:
    model = dropping("bert")
    inputs = inputs_of(model)
    sharded: Any = autotp.compile(model, mesh=mesh_of(group), example_inputs=inputs, random="torch")
    for m in (model, sharded):
        torch.manual_seed(4)
        m(**inputs)[0].square().mean().backward()
    return gradients_differ(sharded, model), sharded.plan.totals.local_flops / sharded.plan.totals.flops


def test_by_torch_the_masks_are_those_of_the_original(pool):
    for error, flops in pool.run(replaying, world=2):
        assert error < 1e-10 and flops > 0.51  # at the price of attention on every rank


class Attention(nn.Module):
    def __init__(self, p: float, **options: Any) -> None:
        super().__init__()
        self.p, self.options = p, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, self.p, **self.options)


def values(program: Capture, given: list[Any]) -> Tensor:
    env: dict[Any, Any] = {leaf.node: [v] for leaf, v in zip(program.inputs, given, strict=True)}
    for leaf in program.leaves:
        if leaf.kind == SEEDS:
            env[leaf.node] = [torch.arange(len(leaf.node.meta["val"]))]
    return run(program, env).outputs[0][0]


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "grouped", "scaled"])
def test_attention_taken_apart_is_the_attention(kind):
    """With nothing dropped it must be torch's own."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"causal": {"is_causal": True}, "grouped": {"enable_gqa": True}, "scaled": {"scale": 0.3}}
    heads = 2 if kind == "grouped" else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 5, 8), torch.randn(2, heads, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.4 if kind == "bool" else torch.randn(5, 5) if kind == "float" else None
    if kind == "bool":
        mask[0, 0, 2] = False  # nothing to attend to  # type: ignore[index]
    model = Attention(0.0, **options.get(kind, {}))
    given = [q, k, v, *([mask] if mask is not None else [])]
    program = capture_model(model, autotp.Inputs(*given), torch.device("cpu"))[0]
    attention = torch.ops.aten.scaled_dot_product_attention
    with patch.object(counter_random, "draws", lambda node: packet_of(node.target) is attention):
        CountedRandom().run(program)
    assert any(n.target is OPS.counter_dropout.default for n in program.graph.nodes)
    given = given if mask is not None else [*given, None][: len(program.inputs)]
    torch.testing.assert_close(values(program, given), model(*given), rtol=1e-5, atol=1e-6)


class Kinds(nn.Module):
    """Stochastic depth (Huang et al. 2016) in two ways, whole channels, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.channels = nn.Dropout1d(P)

    def forward(self, x: Tensor) -> Tensor:
        keep = 1 - P
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        depth = (keep + torch.rand(shape, dtype=x.dtype, device=x.device)).floor() / keep
        other = torch.empty(shape, dtype=x.dtype).bernoulli_(keep) / keep
        hidden = self.channels(torch.relu(self.up(x))) + 0.1 * torch.rand_like(self.up(x))
        picked = torch.bernoulli(torch.sigmoid(hidden))
        return x + depth * other * self.down(hidden * picked)


def test_noise_channels_and_stochastic_depth():
    torch.manual_seed(0)
    model, x = Kinds().double(), torch.randn(4, 6, 16).double()
    program = capture_model(model, autotp.Inputs(x), torch.device("cpu"), False)[0]
    assert sum(n.target in (OPS.counter_uniform.default, OPS.counter_dropout.default) for n in program.graph.nodes) >= 4
    report = autotp.verify(model, 2, x)
    assert report and report.plan is not None, report
    assert report.plan.totals.local_flops < 0.6 * report.plan.totals.flops


def test_what_does_not_draw_gets_no_seeds():
    model = dropping("bert").eval()
    program = capture_model(model, autotp.Inputs(**inputs_of(model)), torch.device("cpu"), False)[0]
    assert all(leaf.kind != SEEDS for leaf in program.leaves)
    by_torch = capture_model(dropping("bert"), autotp.Inputs(**inputs_of(model)), torch.device("cpu"), False,
                             CaptureRequest(random="torch"))[0]  # fmt: skip
    assert all(leaf.kind != SEEDS for leaf in by_torch.leaves) and DEFAULT_CAPTURE.random == "counter"
    with pytest.raises(InputError, match="random='dice'"):
        autotp.plan(model, 2, example_inputs=inputs_of(model), random="dice")


def test_recomputed_activations_have_the_same_mask():
    """In one process: the gradient of a checkpointed part is that of the plain one."""
    model = dropping("bert")
    sharded: Any = autotp.compile(model, tp=1, example_inputs=inputs_of(model))
    found = []
    for wrapped in (False, True):
        if wrapped:
            sharded.bert.encoder.layer[0] = Wrapper(sharded.bert.encoder.layer[0])
        sharded.zero_grad()
        torch.manual_seed(1)
        sharded(**inputs_of(model))[0].square().mean().backward()
        found.append({n: g.clone() for n, g in sharded.full_grad_dict().items()})
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
