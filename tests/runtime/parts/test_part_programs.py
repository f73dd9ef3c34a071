"""A part that is called by itself reads parameters that the planned forward does not read, and that the plan split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.cost.solver.solve import Infeasible
from autotp.errors import RankError
from autotp.ir.marks import mark
from autotp.passes.shard import decide
from tests.helpers.compare import difference, gradients_differ, mesh_of


class Tower(nn.Module):
    """Its last norm and its heads, q, k and v in one weight, are read only where it is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.heads = nn.LayerNorm(8), nn.Linear(8, 3 * 9)

    def hidden(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.norm(self.hidden(x))).view(*x.shape[:2], 3, 3, 3).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower.hidden(x))


def by_itself(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Whole().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    with torch.no_grad():
        found: dict[str, Any] = {"whole": difference(sharded(x), model(x))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "_relaxations", lambda builder: ())
        # No operator can read the norm as it lies, which rank 0 finds for both.
        with pytest.raises((Infeasible, RankError), match="no legal plan exists"):
            sharded._call("tower", (x,), {})
    outputs = [sharded._call("tower", (x,), {}), model.tower(x)]
    for y in outputs:
        y.square().mean().backward()
    program = sharded._programs_made[-1].sharded
    split = {p.name for p in sharded.plan.parameters if p.layout.sharded_dim is not None}
    reads = {x.node: x.name for x in sharded._programs_made[-1].capture.leaves if x.name in split}
    moved = (program.origin[n][0] for n in program.layouts if mark(n).conversion)
    gathers = {reads[node] for node in moved if node in reads}
    found |= {"part": difference(*outputs), "gradients": gradients_differ(sharded, model)}
    return found | {"split": split, "gathers": gathers}


def test_it_gathers_those_that_it_cannot_read_as_they_lie(pool):
    for found in pool.run(by_itself, world=2):
        assert {"tower.norm.weight", "tower.heads.weight", "tower.up.weight"} <= found["split"]
        # The least that it takes: the heads' weight stays where it is, and with it their bias is added after the sum.
        assert found["gathers"] == {"tower.norm.weight", "tower.norm.bias", "tower.heads.bias"}, found
        assert max(found["whole"], found["part"], found["gradients"]) < 1e-12, found


class Blocks(nn.Module):
    """Equal blocks, of which the last is read on demand: the plan splits its weights without a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: Tensor, every: bool = False) -> Tensor:
        for block in self.blocks if every else self.blocks[:2]:
            x = x + block(x)
        return x


def on_demand(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Blocks().double(), torch.randn(4, 8, dtype=torch.float64)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    outputs = [m(x, every=True) for m in (sharded, model)]
    for y in outputs:
        y.square().mean().backward()
    layouts = [str(sharded.plan.placements[f"blocks.{i}.2.bias"]) for i in (0, 2)]
    return {"part": difference(*outputs), "gradients": gradients_differ(sharded, model), "layouts": layouts}


def test_equal_blocks_that_lie_differently_are_decided_each_for_itself(pool):
    for found in pool.run(on_demand, world=2):
        assert found["layouts"][0] != found["layouts"][1], found
        assert max(found["part"], found["gradients"]) < 1e-12, found
