"""`outputs="sharded"`: outputs stay DTensors, in the layouts that the plan gives them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autotp
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.models import inputs_of, redrawn, transformer


def sharded_outputs(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Two groups of two ranks; the outputs stay DTensors."""
    model = transformer("llama")
    inputs = inputs_of(model)
    sharded: Any = autotp.compile(model, 2, example_inputs=inputs, outputs="sharded")
    ranks = sharded._shards.ranks
    found: dict[str, Any] = {"ranks": dist.get_process_group_ranks(ranks.group) if ranks else None}
    for case in (inputs, inputs_of(model, 3, 5, seed=rank // 2)):  # the groups may see different data
        sharded.zero_grad()
        model.zero_grad()
        logits, wanted = sharded(**case).logits, model(**case).logits
        assert isinstance(logits, DTensor) and logits.shape == wanted.shape
        found["placements"] = str(logits.placements)
        whole = logits.full_tensor()
        whole.square().mean().backward()
        wanted.square().mean().backward()
        found["close"] = max(found.get("close", 0.0), difference(whole, wanted), gradients_differ(sharded, model))
    return found


def test_outputs_left_sharded_in_groups_of_ranks_that_follow_each_other(pool):
    told = pool.run(sharded_outputs)
    assert [one["ranks"] for one in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for one in told:
        assert one["placements"] in ("(Shard(dim=2),)", "(Partial(sum),)") and one["close"] < 1e-5, one


class Several(nn.Module):
    """A shard, a sum, a whole value, a number and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.up(x))
        self.seen = self.seen + 1
        return {"hidden": hidden, "sum": self.down(hidden), "x": x * 2, "n": 3, "size": x.shape[0]}


def several_outputs(rank: int, world: int, group: Any) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = redrawn(Several())
    x = torch.randn(4, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh, outputs="sharded")
    found, wanted = sharded(x), model(x)
    values = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    for outputs in (values, wanted):
        (outputs["hidden"].square().sum() + outputs["sum"].square().sum()).backward()
    return {
        "placements": {k: str(v.placements) for k, v in found.items() if isinstance(v, DTensor)},
        "close": max(difference(values[k], v) for k, v in wanted.items() if isinstance(v, Tensor)),
        "plain": (values["n"], values["size"], float(sharded.seen)),
        "gradients": gradients_differ(sharded, model),
    }


def test_every_layout_can_be_an_output(pool):
    for one in pool.run(several_outputs, world=2):
        assert one["placements"] == {"hidden": "(Shard(dim=1),)", "sum": "(Partial(sum),)", "x": "(Replicate(),)"}
        assert one["plain"] == (3, 4, 1.0) and one["close"] < 1e-6 and one["gradients"] < 1e-5, one
