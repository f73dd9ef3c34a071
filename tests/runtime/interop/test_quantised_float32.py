"""In float32 a quantised model that is split parts from the original as one that sums in another order does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.capture.copies import plain_weights
from autotp.driver.compile import capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.proof.run import Simulated, Values, run
from tests.helpers.modules.quantised import quantised

WIDTH, WIDE, TP = 32, 256, 2


def mlp(order: Tensor | None = None) -> nn.Module:
    """A feed-forward; with an order of its hidden values, over which the second product sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.SiLU(), nn.Linear(WIDE, WIDTH))
    if order is not None:
        up: Any = model[0]
        down: Any = model[2]
        with torch.no_grad():
            up.weight.copy_(up.weight[order])
            up.bias.copy_(up.bias[order])
            down.weight.copy_(down.weight[:, order])
    return model


def split(model: nn.Module, x: Tensor) -> Tensor:
    """What rank 0 of the simulated ranks has, in the model's own dtype."""
    plain = plain_weights(model)
    captured, notes = capture_model(plain, Inputs(x), torch.device("cpu"))
    staged = plan_stages(captured, notes, Options.read(TP, Steering(objective="prefill")), "Mlp")
    values = Values.of(staged.planned.program, plain, Inputs(x)).nodes
    assert sum(staged.planned.decisions[n].outs[0].split for n in values) >= 4  # data of both, and a scale or bias
    given: dict[Any, Any] = {}
    placeholders = [n for n in staged.sharded.graph.nodes if n.op == "placeholder"]
    for leaf, node in zip(staged.planned.program.leaves, placeholders, strict=True):
        given[node] = staged.planned.decisions[leaf.node].outs[0].to_runtime().split(values[leaf.node][0], TP)
    with torch.no_grad():
        return run(staged.sharded, given, Simulated(TP)).outputs[0][0]


@pytest.mark.parametrize("kind", ["int8", "float8", "int8 dynamic"])
def test_in_float32_it_is_within_the_spread_of_other_orders(kind):
    x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    orders = [torch.randperm(WIDE, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    with torch.no_grad():
        wanted = quantised(mlp(), kind)(x)
        spread = max(float((quantised(mlp(order), kind)(x) - wanted).abs().max()) for order in orders)
    apart = float((split(quantised(mlp(), kind), x) - wanted).abs().max())
    assert apart <= 2 * spread and spread < 0.02 * float(wanted.abs().max()), (apart, spread)
