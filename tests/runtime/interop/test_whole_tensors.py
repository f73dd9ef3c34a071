"""Parameters drawn, assigned, pruned, or handed in: as on the original, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import autotp
from autotp.errors import StateError
from tests.helpers.compare import mesh_of
from tests.helpers.models import redrawn


def model_of() -> Any:
    torch.manual_seed(0)
    return redrawn(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))).double()


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, dtype=torch.float64)


def apart(model: Any, sharded: Any) -> float:
    with torch.no_grad():
        wanted = model(inputs())
        return float((sharded(inputs()) - wanted).abs().max() / wanted.abs().max())


INITS: dict[str, Any] = {
    "normal_": nn.init.normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "eye_": nn.init.eye_,
    "of .data": lambda t: t.data.uniform_(-1, 1),
}
REFUSED: dict[str, Any] = {
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda t: nn.init.sparse_(t, 0.2),
    "elements": lambda t: t.data.__setitem__(torch.tensor([1, 5]), 3.0),
}


def initialised(model: Any, sharded: Any) -> dict[str, Any]:
    """Differences of the state after each initialiser, and whether the generators are in one state."""
    found: dict[str, Any] = {}
    for name, init in INITS.items():
        states = []
        for m in (model, sharded):
            torch.manual_seed(2)
            m.apply(lambda q, f=init: f(q.weight) if isinstance(q, nn.Linear) else None)
            states.append(torch.get_rng_state())
        whole = sharded.full_state_dict()
        same = all(torch.equal(whole[n], t) for n, t in model.state_dict().items())
        found[name] = same and torch.equal(*states)
    for m in (model, sharded):
        torch.manual_seed(3)
        m.apply(lambda q: q.reset_parameters() if isinstance(q, nn.Linear) else None)
    torch.manual_seed(4)
    wanted = torch.rand_like(model[0].weight)
    torch.manual_seed(4)
    drawn: Any = torch.rand_like(sharded[0].weight)
    found["rand_like"] = torch.equal(drawn.full_tensor(), wanted)
    return found | {"reset_parameters": apart(model, sharded) < 1e-12}


def refused(model: Any, sharded: Any) -> dict[str, Any]:
    """Initialisers that compute with what they have drawn are refused; what is loaded in their place arrives."""
    found: dict[str, Any] = {}
    for name, init in REFUSED.items():
        with pytest.raises(StateError, match="full_tensor"):
            sharded.apply(lambda q, f=init: f(q.weight) if isinstance(q, nn.Linear) else None)
        found[name] = True
    nn.init.normal_(model[0].weight)
    sharded.load_state_dict(model.state_dict())
    return found | {"loaded": apart(model, sharded) < 1e-12}


def assigned(model: Any, sharded: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    weight = model[0].weight.detach() * 3
    counts = [sharded._calls.count()]  # of writes, by which ranks notice one that others did not make
    for m in (model, sharded):
        m[2].weight.data = m[2].weight.data * 0.5
        counts.append(sharded._calls.count())
        m[2].weight.data.mul_(0.5)
        counts.append(sharded._calls.count())
    found["data"] = apart(model, sharded) < 1e-12
    found["counted"] = counts[0] == counts[1] == counts[2] < counts[3] < counts[4]
    for value in (
        weight,
        torch.ones(3),
        sharded[0].weight.detach().float(),
        sharded[0].weight.redistribute(placements=[Replicate()]),
    ):
        with pytest.raises(StateError, match=r"\.data = a tensor of shape \(.*is not placed on the ranks as this one"):
            sharded[0].weight.data = value
    found["not as it lies"] = apart(model, sharded) < 1e-12
    with pytest.raises(StateError, match="not split as the parameter"):
        sharded[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return found


def elements(w: Tensor) -> None:
    w[w < -0.5] = 0.0


WRITES: dict[str, Any] = {
    "a row": lambda w: w[3].zero_(),
    "a column": lambda w: w[:, 2].mul_(3),
    "rows": lambda w: w.narrow(0, 1, 4).add_(1),
    "assigned": lambda w: w.__setitem__(slice(1, 3), 4.0),
    "a row of columns": lambda w: w.t()[2].copy_(w.t()[1]),
    "chunks": lambda w: w.chunk(2)[1].chunk(2, 1)[0].fill_(1),
    "diagonal": lambda w: w.diagonal().fill_(2),
    "in a line": lambda w: w.view(-1)[3:9].mul_(5),
}


@torch.no_grad()
def written(model: Any, sharded: Any) -> dict[str, Any]:
    """Parts of weights that are split by rows and by columns: a write arrives, or is refused in one of them."""
    found: dict[str, Any] = {}
    for m in (model, sharded):
        elements(m[0].weight)
        elements(m[2].weight.data)
        # A tensor that is whole on every rank, also one that is broadcast.
        m[0].weight.copy_(torch.arange(256.0, dtype=torch.float64).view(32, 8) / 256)
        m[0].bias += torch.arange(32.0, dtype=torch.float64)
        m[2].weight.data.lerp_(torch.ones(8, 1, dtype=torch.float64), 0.5)
        m[2].weight[1:3] = torch.arange(32.0, dtype=torch.float64)
    for name, write in WRITES.items():
        refusals = 0
        for i in (0, 2):
            before = model[i].weight.clone()
            write(model[i].weight)
            try:
                write(sharded[i].weight)
            except StateError as error:
                assert "Take the whole, w = p.detach().full_tensor()" in str(error)
                model[i].weight.copy_(before)
                refusals += 1
        found["refused: " + name] = refusals > 0
        state = sharded.full_state_dict()
        found["written: " + name] = all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    return found


def handed_in(model: Any, sharded: Any) -> dict[str, Any]:
    """Tensors through `functional_call`: values and gradients of such as lie as parameters do; others are refused."""
    outputs, grads = [], []
    for m in (model, sharded):
        given = {n: (p.detach() * 2).requires_grad_() for n, p in m.named_parameters()}
        outputs.append(functional_call(m, given, (inputs(),)))
        grads.append(torch.autograd.grad(outputs[-1].square().sum(), list(given.values())))
    close = [torch.allclose(a, b.full_tensor(), rtol=1e-10) for a, b in zip(*grads, strict=True)]
    for value in (model[0].weight.detach(), torch.ones(3, 3)):
        with pytest.raises(StateError, match="the tensor in the place of 0.weight has the shape .* load_state_dict"):
            functional_call(sharded, {"0.weight": value}, (inputs(),))
    return {"functional_call": torch.allclose(*outputs, rtol=1e-10) and all(close)}


def made(module: Any) -> None:
    """Let a hook make the weight before its layer's forward."""
    module.raw, module.gain = module.weight, 2.0
    del module._parameters["weight"]
    module.register_forward_pre_hook(lambda q, args: setattr(q, "weight", q.raw * q.gain))


MAKERS: dict[str, Any] = {
    "by hand": made, "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5), "parametrized": weight_norm,
}  # fmt: skip


def changed(rank: int, world: int, group: Any) -> dict[str, Any]:
    model = model_of()
    sharded: Any = autotp.compile(model, example_inputs=inputs(), mesh=mesh_of(group))
    assert {"S(0)", "S(1)"} <= {str(p.placements[0]) for p in sharded.parameters()}
    found = written(model, sharded) | initialised(model, sharded)
    return found | refused(model, sharded) | assigned(model, sharded) | handed_in(model, sharded)


def test_two_ranks_do_what_the_original_does(pool):
    for found in pool.run(changed, world=2):
        assert all(found.values()), found


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_weight_that_a_hook_makes_is_refused_at_the_next_call(maker):
    model = model_of()
    sharded: Any = autotp.compile(model, 1, example_inputs=inputs())
    assert apart(model, sharded) == 0.0
    maker(sharded[2])
    with pytest.raises(StateError, match="2.weight is no parameter any more: .* Put it into the original model"):
        sharded(inputs())
    maker(model[2])
    again: Any = autotp.compile(model, 1, example_inputs=inputs())
    assert apart(model, again) < 1e-12
