"""What capture does on several ranks: they take the same branch, and they fail together."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import autotp
from tests.helpers.cases.capture_cases import IDS, MORE, WIDTH, Decides, Experts, Masked, X
from tests.helpers.cases.selfcheck_cases import Counter, Net
from tests.helpers.errors import error_of


def on_ranks(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Models past the first attempt, against themselves; and ranks that differ."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    padded = MORE.clone()
    padded[:, 5:] = 0
    found: dict[str, Any] = {}
    for model, example, calls in (
        (Decides(), IDS, (IDS, padded, MORE, padded)),
        (Masked(), IDS, (IDS, MORE)),
        (Experts(), X, (X, X[:1])),
    ):
        sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=example)
        for call in calls:
            mine, its = sharded(call), model(call)
            torch.testing.assert_close(mine, its)
            mine.square().sum().backward()
            its.square().sum().backward()
        gradients = sharded.full_grad_dict()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, msg=f"{type(model).__name__} {name}")
        assert any(p.local != p.shape for p in sharded.plan.parameters)
    deciding: Any = autotp.compile(Decides(), mesh=mesh, example_inputs=IDS)
    deciding(IDS)
    found["values"] = error_of(lambda: deciding(padded if rank else MORE))
    wrong = Counter() if rank else Net().eval()
    found["self-check"] = error_of(lambda: autotp.compile(wrong, mesh=mesh, example_inputs=torch.ones(4, WIDTH)))
    return found


def test_on_two_ranks(pool):
    told = pool.run(on_ranks, world=2)
    for one in told:
        assert one["values"][0] == "RankError" and "values of the inputs" in one["values"][1]
        assert "self-check: the captured graph is not the model" in one["self-check"][1]
        assert all(seconds < 60 for _, _, seconds in one.values())
    assert [one["self-check"][0] for one in told] == ["RankError", "CaptureError"]
