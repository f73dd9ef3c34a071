"""Folders that earlier versions wrote are read, to the bit: what was saved is what users have.

`tests/runtime/checkpoint/written` holds an archive by version, made once by `PYTHONPATH=. python -m
tests.runtime.checkpoint.test_checkpoint_written NAME`, and never again: "first" is of the version without digests,
"digests" of the first one with them.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.processes.pool import Pool

WRITTEN = Path(__file__).parent / "written"
SLICES = 2


class Net(nn.Module):
    """A fused projection, a norm, tied tables: each way in which a parameter is held."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.qkv = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(y))


IDS = torch.arange(24).view(4, 6)


def fill(model: nn.Module) -> None:
    """Weights that need no random numbers: any version of torch has the same."""
    with torch.no_grad():
        for place, (_, p) in enumerate(sorted(model.named_parameters())):
            p.copy_((torch.arange(p.numel()).view(p.shape) * 7 % 101 - 50) / (200 + place))


def made(rank: int, group: Any, dp: int) -> tuple[Any, torch.optim.Optimizer]:
    """The module over these ranks, after no step, and its optimizer."""
    model = Net()
    fill(model)
    mesh = init_device_mesh("cpu", (SLICES, 2), mesh_dim_names=("dp", "tp")) if dp > 1 else mesh_of(group)
    ids = IDS.chunk(dp)[rank // 2 if dp > 1 else 0]
    more = {"dp": dp, "fully_shard": True} if dp > 1 else {}
    sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=ids, **more)
    return sharded, torch.optim.AdamW(sharded.parameters(), lr=0.01)


def step(sharded: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that are whole numbers of the weights: no sum, which could round in another order."""
    for p in sharded.parameters():
        p.grad = (p.detach() * 2).clone()
    optimizer.step()


def content(sharded: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and what the optimizer keeps, whole."""
    names = {p: name for name, p in sharded.named_parameters()}
    out = {f"model {name}": x for name, x in sharded.full_state_dict().items()}
    for p, state in optimizer.state.items():
        for key, x in state.items():
            whole = x.full_tensor() if hasattr(x, "full_tensor") else x
            out[f"{key} of {names[p]}"] = whole.clone()
    return out


def write(rank: int, world: int, group: Any, folder: str) -> None:
    dp = world // 2
    sharded, optimizer = made(rank, group, dp)
    step(sharded, optimizer)
    place = Path(folder) / f"dp{dp}"
    sharded.save_checkpoint(place / "dcp", optimizer=optimizer, extra={"step": 1})
    sharded.save_checkpoint(place / "huggingface", format="huggingface")


def read(rank: int, world: int, group: Any, folder: str, written_by: str) -> dict[str, float]:
    """By version the largest difference of what is loaded from what was saved."""
    dp = world // 2
    sharded, optimizer = made(rank, group, dp)
    step(sharded, optimizer)
    wanted, out = content(sharded, optimizer), {}
    for place in sorted(Path(folder).iterdir()):
        for _ in range(2):
            step(sharded, optimizer)
        loaded = sharded.load_checkpoint(place / written_by / "dcp", optimizer=optimizer)
        assert loaded.extra == {"step": 1}
        found = content(sharded, optimizer)
        assert found.keys() == wanted.keys() and len(found) > 15
        worst = max(float((found[name].double() - x.double()).abs().max()) for name, x in wanted.items())
        for kind in ("huggingface", "dcp"):
            step(sharded, optimizer)
            sharded.load_checkpoint(place / written_by / kind)
            weights = sharded.full_state_dict()
            worst = max(worst, *(float((weights[n] - wanted[f"model {n}"]).abs().max()) for n in weights))
        out[place.name] = worst
        sharded.load_checkpoint(place / written_by / "dcp", optimizer=optimizer)
    return out


@pytest.mark.parametrize(("written_by", "world"), [("dp1", 2), ("dp2", 4), ("dp1", 4), ("dp2", 2)])
def test_what_was_written_is_read(pool, tmp_path, written_by, world):
    for file in WRITTEN.iterdir():
        with tarfile.open(file) as archive:
            archive.extractall(tmp_path / file.name.partition(".")[0], filter="data")
    found = pool.run(read, str(tmp_path), written_by, world=world)
    assert found == [{"digests": 0.0, "first": 0.0}] * world


def main(version: str) -> None:
    """Write the archive of this version."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool()
        for world in (2, 4):
            pool.run(write, folder, world=world)
        with tarfile.open(WRITTEN / f"{version}.tar.gz", "x:gz") as archive:
            for place in sorted(Path(folder).iterdir()):
                archive.add(place, place.name)


if __name__ == "__main__":
    main(sys.argv[1])
