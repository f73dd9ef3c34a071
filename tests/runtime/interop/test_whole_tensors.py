"""Parameters drawn again, assigned, pruned and handed in whole: on a sharded module what it is on the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
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


def assigned(model: Any, sharded: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for m in (model, sharded):
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(m.parameters()) * 2, m.parameters())
    found["vector_to_parameters"] = apart(model, sharded) < 1e-12
    weight = model[0].weight.detach() * 3
    for m in (model, sharded):
        m[0].weight.data = weight.clone()  # whole
        m[2].weight.data = m[2].weight.data * 0.5
    found["data"] = apart(model, sharded) < 1e-12
    with pytest.raises(StateError, match=r"\.data = a tensor of shape \(3,\)"):
        sharded[0].weight.data = torch.ones(3)
    with pytest.raises(StateError, match="not split as the parameter"):
        sharded[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return found


def elements(w: Tensor) -> None:
    w[torch.tensor([1, 5])] = 3.0
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
REFUSED: dict[str, Any] = {
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda t: nn.init.sparse_(t, 0.2),
}


@torch.no_grad()
def written(model: Any, sharded: Any) -> dict[str, Any]:
    """Parts of weights that are split by rows and by columns: a write arrives, or is refused in one of them."""
    found: dict[str, Any] = {}
    for m in (model, sharded):
        elements(m[0].weight)
        elements(m[2].weight.data)
    for name, write in WRITES.items():
        refusals = 0
        for i in (0, 2):
            before = model[i].weight.clone()
            write(model[i].weight)
            try:
                write(sharded[i].weight)
            except StateError as error:
                assert "p.data = w" in str(error)
                model[i].weight.copy_(before)
                refusals += 1
        found["refused: " + name] = refusals > 0
        state = sharded.full_state_dict()
        found["written: " + name] = all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    return found


def refused(model: Any, sharded: Any) -> dict[str, Any]:
    """Initialisers that compute with what they have drawn."""
    found = {}
    for name, init in REFUSED.items():
        with pytest.raises(StateError, match="full_tensor"):
            sharded.apply(lambda q, f=init: f(q.weight) if isinstance(q, nn.Linear) else None)
        found[name] = True
    sharded.load_state_dict(model.state_dict())
    return found


def handed_in(model: Any, sharded: Any) -> dict[str, Any]:
    """Whole tensors through `functional_call`: values and gradients."""
    given = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
    outputs = [functional_call(m, given, (inputs(),)) for m in (model, sharded)]
    grads = [torch.autograd.grad(y.square().sum(), list(given.values())) for y in outputs]
    close = [torch.allclose(a, b, rtol=1e-10) for a, b in zip(*grads, strict=True)]
    with pytest.raises(StateError, match=r"in the place of 0.weight has the shape \(3, 3\)"):
        functional_call(sharded, {"0.weight": torch.ones(3, 3)}, (inputs(),))
    return {"functional_call": torch.allclose(*outputs, rtol=1e-10) and all(close)}


def hooked(model: Any, sharded: Any) -> dict[str, Any]:
    """Weights that a hook before the forward makes: by hand, by pruning, by a parametrization."""
    found: dict[str, Any] = {}
    for m in (model, sharded):
        m[0].raw, m[0].gain = m[0].weight, 1.0
        del m[0]._parameters["weight"]
        m[0].register_forward_pre_hook(lambda q, args: setattr(q, "weight", q.raw * q.gain))
    for gain in (1.0, 2.0, 3.0):
        for m in (model, sharded):
            m[0].gain = gain
            m.zero_grad()
            m(inputs()).square().sum().backward()
        same = torch.allclose(sharded[0].raw.grad.full_tensor(), model[0].raw.grad, rtol=1e-10)
        found[f"gain {gain}"] = same and apart(model, sharded) < 1e-12
    for m in (model, sharded):
        prune.l1_unstructured(m[2], "weight", 0.5)
    found["pruned"] = apart(model, sharded) < 1e-12
    for m in (model, sharded):
        prune.remove(m[2], "weight")
        weight_norm(m[2])
    found["pruned for good, parametrized"] = apart(model, sharded) < 1e-12
    return found


def changed(rank: int, world: int, group: Any) -> dict[str, Any]:
    model = model_of()
    sharded: Any = autotp.compile(model, example_inputs=inputs(), mesh=mesh_of(group))
    assert {"S(0)", "S(1)"} <= {str(p.placements[0]) for p in sharded.parameters()}
    found = written(model, sharded) | initialised(model, sharded)
    found |= assigned(model, sharded) | handed_in(model, sharded)
    return found | refused(model, sharded) | hooked(model, sharded)


def test_two_ranks_do_what_the_original_does(pool):
    for found in pool.run(changed, world=2):
        assert all(found.values()), found


def test_hooks_that_make_a_weight_are_in_time_on_one_rank():
    model = model_of()
    sharded: Any = autotp.compile(model, 1, example_inputs=inputs())
    for m in (model, sharded):
        m[0].raw = m[0].weight
        del m[0]._parameters["weight"]
        m[0].register_forward_pre_hook(lambda q, args: setattr(q, "weight", q.raw * q.gain))
    for gain in (1.0, 2.0):
        model[0].gain = sharded[0].gain = gain
        assert apart(model, sharded) == 0.0
