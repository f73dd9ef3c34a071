"""Products in float8: torchao's numbers unsharded, and sharded those of one device for a hundred steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp import compat
from autotp.comm.conversions import g
from autotp.driver.compile import capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.layouts import Partial, R
from autotp.ir.marks import mark
from autotp.ir.op import Op, Rule
from autotp.kernels.float8 import INPUT, product
from autotp.proof.certificate import certificate
from autotp.rules.core import RULES
from benchmarks.lists.hand_plans import Counted
from tests.helpers.compare import mesh_of
from tests.helpers.modules.float8 import SLOW, SMALL, WIDTH, Simulated, apart, one_device, sharded, train, words
from tests.helpers.modules.quantised import torchao

OPS: Any = torch.ops.autotp
CAST = OPS.float8_cast.default
RECIPES = "tensorwise", "rowwise", "rowwise_with_gw_hp"
BY_TENSOR = compat.VERSION < (2, 12)  # torch multiplies with scales of rows on a GPU alone


@pytest.mark.parametrize(("recipe", "tp"), [("tensorwise", 2), ("rowwise", 4), ("rowwise_with_gw_hp", 2)])
def test_a_hundred_steps_are_those_of_one_device(recipe, tp):
    found = train(Simulated(words(torch.float64), recipe, tp))
    assert apart(found, one_device(recipe, torch.float64)) < 1e-10


def test_it_learns_and_not_as_without():
    losses = one_device("tensorwise", torch.float64)
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])
    assert apart(train(words(torch.float64)), losses) > 1e-3


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_in_float32_it_is_as_near_as_one_device_that_sums_in_another_order(recipe):
    """One number that is rounded to its neighbour is a whole step of float8: runs part as those of any other order."""
    wanted = one_device(recipe, torch.float32)
    spread = max(apart(one_device(recipe, torch.float32, reorder), wanted) for reorder in (1, 2))
    assert 1e-3 < spread < 0.1
    assert apart(train(Simulated(words(torch.float32), recipe, 2)), wanted) <= 2 * spread


def step(model: Any) -> dict[str, Tensor]:
    """The gradients of one step."""
    model(torch.arange(16).view(2, 8)).pow(2).sum().backward()
    return model.full_grad_dict()


def on_ranks(rank: int, world: int, group: Any, recipe: str) -> tuple[dict[str, Tensor], float, float]:
    """One step's gradients; the bytes that were counted, and those of the plan."""
    model = sharded(words(torch.float64), recipe, mesh=mesh_of(group), sequence_parallel=True, cluster=SLOW)
    with Counted(world) as counted:
        model(torch.arange(16).view(2, 8)).pow(2).sum().backward()
    return model.full_grad_dict(), counted.bytes, model.plan.totals.sent


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_ranks_it_is_the_same_and_sends_what_the_plan_says(pool, recipe):
    wanted = step(sharded(words(torch.float64), recipe, tp=1))
    for found, counted, planned in pool.run(on_ranks, recipe, world=2):
        assert all((found[n] - g).abs().max() < 1e-10 * g.abs().max() for n, g in wanted.items())
        assert counted == planned


def test_what_is_cast_is_gathered_in_a_byte_an_element():
    staged = Simulated(words(torch.float64), "tensorwise", 2).staged
    gathers = [n for n in staged.sharded.graph.nodes if n.target is g]
    cast = [n for n in gathers if n.args[0].target is CAST]
    assert len(cast) == 2  # before q, k and v, and before gate and up
    assert all(n.kwargs == {"wire": torch.float8_e4m3fn} for n in cast)
    prices, value = staged.builder.prices, staged.planned.program.graph.find_nodes(op="call_function", target=CAST)[0]
    ways = [(x.outs[0], R) for n, x in staged.planned.decisions.items() if n is value]
    size = 2 * 8 * WIDTH
    assert prices.traffic((value, 0), *ways[0]).bytes == size / 2 + 8 * size / 2  # there in a byte, back in eight


def off(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a part of the largest number."""
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


def test_unsharded_it_is_torchaos():
    float8 = torchao("torchao.float8")
    for recipe in RECIPES[:1] if BY_TENSOR else RECIPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False), nn.Linear(32, 32)).bfloat16()
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        theirs = float8.convert_to_float8_training(
            copy.deepcopy(model), config=config, module_filter_fn=lambda _, n: n != "3"
        )
        x, gradient = torch.randn(2, 4, 16, 32).bfloat16()
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours = autotp.compile(model, 1, example_inputs=b, precision={**SMALL, "recipe": recipe}, check_capture=False)
        y = ours(b)
        assert torch.equal(y, theirs(a)) and not torch.equal(y, model(x))
        theirs(a).backward(gradient)
        y.backward(gradient)
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)  # sums without rounding
        gradients = ours.full_grad_dict()
        wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
        assert len(wanted) == 5 and all(off(gradients[n], g) <= 2**-8 for n, g in wanted.items())  # the last bit


@pytest.mark.parametrize("rows", [False] if BY_TENSOR else [False, True])
def test_a_product_on_a_cpu_is_torchs_but_for_the_order_of_its_sums(rows):
    torch.manual_seed(0)
    a, b = ((100 * torch.randn(n, 48)).to(INPUT) for n in (32, 64))
    scales = (torch.rand(32, 1), torch.rand(1, 64)) if rows else (torch.rand(()), torch.rand(()))
    theirs = torch.ops.aten._scaled_mm.default(a, b.t(), *scales, out_dtype=torch.float32)
    assert off(product(a, b, *scales, torch.float32), theirs) <= 4e-7
    assert off(product(a, b, 2 * scales[0], scales[1], torch.float32), theirs) > 0.9


def unreduced(op: Op) -> Rule:
    """The largest value of a rank's part, taken for that of the whole."""
    found = rule_of_amax(op)
    return replace(found, factors=tuple(replace(f, alike=frozenset({0})) for f in found.factors))


def summed(op: Op) -> Rule:
    """Largest values of gradients, added up over the ranks."""
    found = rule_of_seen(op)
    return replace(found, factors=tuple(replace(f, maxima=frozenset()) for f in found.factors))


rule_of_amax, rule_of_seen = RULES[OPS.float8_amax.default], RULES[OPS.float8_seen.default]


@pytest.mark.parametrize(
    ("operator", "wrong"), [(OPS.float8_amax.default, unreduced), (OPS.float8_seen.default, summed)]
)
def test_a_wrong_reduction_of_largest_values_is_noticed(monkeypatch, operator, wrong):
    monkeypatch.setitem(RULES, operator, wrong)
    report = autotp.verify(words(torch.float32), 2, torch.arange(16).view(2, 8), precision=SMALL, cluster=SLOW)
    assert not report
    assert report.difference is not None


class Delayed(nn.Module):
    """Delayed scaling: the scale of a cast is of the largest values of the calls before, which a buffer keeps."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("history", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.up(x))
        scale = 448 / self.history.amax()
        self.history = torch.cat([self.history[1:], x.detach().abs().amax().view(1)])
        rounded = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return self.down(x + (rounded - x).detach())


def test_a_history_that_is_reduced_over_a_wrong_group_is_refused_by_the_types():
    model, x = Delayed().double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
    assert (report := autotp.verify(model, 2, x, cluster=SLOW, certify=True)) and report.certificate
    captured, notes = capture_model(model, Inputs(x), torch.device("cpu"))
    staged = plan_stages(captured, notes, Options.read(2, Steering(cluster=SLOW)), "Delayed")
    graph = staged.sharded.graph
    (reduced,) = [n for n in graph.nodes if mark(n).conversion == (Partial("max"), R)]
    assert "history" in captured.mutations.values()
    # A maximum over any other ranks leaves the value a candidate among the tp ranks.
    reduced.replace_all_uses_with(reduced.args[0])
    graph.erase_node(reduced)
    refused = certificate(staged.planned, staged.sharded)
    assert not refused and "cat" in str(refused)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_types_of_a_program_in_float8_are_certified(recipe):
    model, ids, precision = words(torch.float32), torch.arange(16).view(2, 8), {**SMALL, "recipe": recipe}
    plan = autotp.plan(model, 2, example_inputs=ids, precision=precision, cluster=SLOW, sequence_parallel=True)
    assert autotp.Plan.from_json(plan.to_json()) == plan
    found = autotp.certify(model, plan, ids, precision=precision)
    assert found, found
