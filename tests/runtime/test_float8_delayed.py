"""Delayed scaling in float8: histories are buffers of largest values over all ranks, also over dp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import InputError
from autotp.ir.layouts import Partial, R
from autotp.ir.marks import mark
from autotp.kernels.float8 import GRADIENT, INPUT, scale_of
from autotp.proof.certificate.certificate import certificate
from tests.helpers.compare import difference
from tests.helpers.float8 import SMALL, Simulated, apart, one_device, train, words

OPS: Any = torch.ops.autotp
DELAYED: dict[str, Any] = {**SMALL, "recipe": "delayed"}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_hundred_steps_are_those_of_one_device(tp):
    model = Simulated(words(torch.float64), "delayed", tp)
    losses = one_device("delayed", torch.float64)
    assert apart(train(model), losses) < 1e-10
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]) and apart(losses, one_device("tensorwise", torch.float64)) > 1e-3


def by_hand(x: Tensor, weight: Tensor, grad: Tensor, history: list[list[float]]) -> tuple[Tensor, Tensor]:
    """A product and the gradient of its weight, by what earlier calls had; the history then has this call's."""
    values, types = (x, weight, grad), (INPUT, INPUT, GRADIENT)
    scales = [scale_of(torch.tensor(max(h, default=0.0)), t) for h, t in zip(history, types, strict=True)]
    cast = [
        (v * s.double()).clamp(-torch.finfo(t).max, torch.finfo(t).max).to(t).double() * s.reciprocal().double()
        for v, s, t in zip(values, scales, types, strict=True)
    ]
    for v, seen in zip(values, history, strict=True):
        seen[:] = [*seen, float(v.abs().max())][-3:]
    return cast[0] @ cast[1].t(), cast[2].t() @ cast[0]


def test_the_scales_are_those_of_earlier_calls_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(16, 32, bias=False).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "history": 3, "head": True})
    history: list[list[float]] = [[], [], []]
    for step in range(6):
        x, grad = (step + 1) * torch.randn(8, 16).double(), torch.randn(8, 32).double() / (step + 1)
        y = ours(x)
        y.backward(grad)
        wanted = by_hand(x, model.weight.detach(), grad, history)
        assert torch.allclose(y, wanted[0], rtol=1e-12) and torch.allclose(ours.weight.grad, wanted[1], rtol=1e-12)
        ours.zero_grad()


class Twice(nn.Module):
    """A layer that is called twice, within a region that is computed again in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(16, 16), again

    def both(self, x: Tensor) -> Tensor:
        return self.layer(3 * torch.tanh(self.layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.again else self.both(x)


def test_what_is_computed_again_has_the_scales_of_the_first_time():
    """And a layer that is called twice has one history, of the largest of both."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Twice(again).double(), torch.randn(4, 16, dtype=torch.float64)
        ours: Any = autotp.compile(model, 1, example_inputs=x, precision={**DELAYED, "head": True})
        for step in range(4):
            ours((step + 1) * x).square().sum().backward()
        found.append([ours.layer.weight.grad, ours.layer.float8_history, ours.layer.float8_latest])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    inside = 3 * torch.tanh(model.layer(4 * x)).abs().max()
    history = found[0][1]
    assert history[0, -1] == max(inside, 4 * x.abs().max()) and (history[:, -3:] > 0).all()


def test_in_evaluation_nothing_is_recorded():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    ours: Any = autotp.compile(model, 1, example_inputs=x, precision=DELAYED)
    ours(x).sum().backward()
    history = ours[0].float8_history
    ours.eval()(x)
    assert torch.equal(ours[0].float8_history, history) and float(ours[0].float8_latest) > 0
    ours.train()(x)
    assert not torch.equal(ours[0].float8_history, history)


def test_what_would_lose_the_largest_value_of_a_gradient_is_refused():
    with pytest.raises(InputError, match="backend='aot_eager'"):
        autotp.compile(nn.Linear(16, 16), 1, backend="aot_eager", precision="float8-delayed")


def test_a_history_that_is_reduced_over_a_wrong_group_is_refused_by_the_types():
    staged = Simulated(words(torch.float64), "delayed", 2).staged
    assert certificate(staged.planned, staged.sharded)
    graph, targets = staged.sharded.graph, (OPS.float8_record.default,)
    over = [n for n in graph.nodes if mark(n).conversion == (Partial("max"), R)]
    reduced = next(n for n in over if any(user.target in targets for user in n.users))
    # A maximum over any other ranks leaves the value a candidate among the tp ranks.
    reduced.replace_all_uses_with(reduced.args[0])
    graph.erase_node(reduced)
    refused = certificate(staged.planned, staged.sharded)
    assert not refused and "float8_record" in str(refused)


def steps(model: Any, ids: Tensor, slices: int = 1) -> None:
    """Three steps on these words; by the sum of the losses of so many slices, as gradients over dp are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / slices)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        (slices * loss).backward()
        optimizer.step()


def whole(model: Any) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.full_state_dict().items()}


def on_a_mesh(rank: int, world: int, group: Any, folder: str) -> Any:
    """Whole states after three steps on slices, those of a module that read a checkpoint of it, and each after one
    more."""
    mesh, ids = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.arange(32).view(4, 8)
    mine = ids.chunk(2)[mesh["dp"].get_local_rank()]
    made = [
        autotp.compile(
            words(torch.float64), mesh=mesh, dp=2, example_inputs=mine, precision=DELAYED, check_capture=False
        )
        for _ in range(2)
    ]
    steps(made[0], mine)
    found = [whole(made[0])]
    made[0].save_checkpoint(folder)
    made[1].load_checkpoint(folder)
    found.append(whole(made[1]))
    for model in made:
        steps(model, mine)
        found.append(whole(model))
    return found


@pytest.mark.ranks
def test_over_dp_and_tp_histories_and_steps_are_those_of_one_device_and_are_saved(pool, tmp_path):
    ids = torch.arange(32).view(4, 8)
    alone = autotp.compile(words(torch.float64), 1, example_inputs=ids, precision=DELAYED)
    wanted = []
    for _ in range(2):
        steps(alone, ids, 2)
        wanted.append({n: t.clone() for n, t in alone.state_dict().items()})
    for found in pool.run(on_a_mesh, str(tmp_path / "saved")):
        for states, one in zip(found, [wanted[0], wanted[0], wanted[1], wanted[1]], strict=True):
            assert states.keys() == one.keys() and any("float8_history" in n for n in one)
            assert max(difference(states[n], t) for n, t in one.items()) < 1e-10
