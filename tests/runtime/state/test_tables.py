"""Weights that live in buffers, such as quantised ones and frozen tables, are split as parameters are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autotp
from autotp.ir.layouts import Shard


class Quantised(nn.Module):
    """A linear layer of whole numbers, with a scale for each row."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", torch.randint(-100, 100, (out, width), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(out, 1) / 100)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Frozen(nn.Module):
    """A table and layers that are all buffers, beside what no rank can split: indices, and a sum that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.order: Tensor
        self.seen: Tensor
        self.register_buffer("table", torch.randn(48, 16))
        self.up, self.down = Quantised(16, 32), Quantised(32, 16)
        self.register_buffer("order", torch.arange(16).view(4, 4))
        self.register_buffer("seen", torch.zeros(2, 2))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = F.embedding(ids, self.table)
        return self.down(F.silu(self.up(x))) + x[..., self.order.flatten()]


class Codes(nn.Module):
    """A table that training alone writes, as of vector quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        near = (x @ self.codes.t()).softmax(-1)
        if self.training:
            self.codes.lerp_(near.detach().t() @ x.detach(), 0.1)
        return near @ self.codes


def ids() -> Tensor:
    return torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    return autotp.verify(Frozen(), 2, ids())


def test_a_plan_splits_weights_in_buffers(report):
    assert report
    tables = report.plan.tables
    assert {n: x.dim for n, x in tables.items() if isinstance(x, Shard) and "weight" in n} == {
        "up.weight": 0, "down.weight": 1,
    }  # fmt: skip
    assert "table" in tables and not {"order", "seen"} & set(tables)
    whole = sum(b.numel() * b.element_size() for b in Frozen().buffers())
    assert report.plan.memory.buffers < 0.65 * whole
    assert autotp.Plan.from_json(report.plan.to_json()) == report.plan


def held(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Frozen()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=ids())
    found, wanted = sharded(ids()), model(ids())
    part: Any = sharded.up.weight
    sharded.save_checkpoint(folder)
    again: Any = autotp.compile(Frozen(), mesh=mesh, example_inputs=ids())  # other numbers
    other = float((again(ids()) - wanted).abs().max())
    again.load_checkpoint(folder)
    loaded = float((again(ids()) - wanted).abs().max())
    again.load_state_dict({n: t * 0 for n, t in before.items()})
    zeros = max(float(t.abs().max()) for t in again.full_state_dict().values())
    again.load_state_dict(model.state_dict())
    full = sharded.full_state_dict()
    codes, x = Codes(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    coded = autotp.compile(codes, mesh=mesh, example_inputs=x)
    for each in (coded, codes):
        each(x)
    return {
        "codes": float((coded.eval()(x) - codes.eval()(x)).abs().max()),
        "difference": float((found - wanted).abs().max()),
        "other": other,
        "loaded": loaded,
        "zeros": zeros,
        "by state": float((again(ids()) - model(ids())).abs().max()),
        "state": all(torch.equal(full[n], t) for n, t in model.state_dict().items() if n != "seen"),
        "kinds": [isinstance(sharded.state_dict()[n], DTensor) for n in ("up.weight", "seen")],
        "part": (tuple(part.to_local().shape), part.dtype),
    }


@pytest.mark.ranks
def test_a_rank_holds_its_part_of_a_buffer_and_saves_and_loads_it(pool, tmp_path):
    for found in pool.run(held, str(tmp_path / "saved"), world=2):
        assert max(found["difference"], found["loaded"], found["by state"], found["zeros"], found["codes"]) < 1e-4, (
            found
        )
        assert found["other"] > 1e-2
        assert found["state"] and found["kinds"] == [True, False], found
        assert found["part"] == ((16, 16), torch.int8)
