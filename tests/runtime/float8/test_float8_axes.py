"""Float8 on meshes of two axes: over which ranks largest values are taken, and that saved histories go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from tests.helpers.compare import difference
from tests.helpers.modules.float8 import SMALL, sharded, words


def compiled(recipe: str, ids: Tensor, **more: Any) -> Any:
    return sharded(words(torch.float64), recipe, ids, **more)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def steps(model: Any, ids: Tensor, slices: int = 1) -> None:
    """Three steps on these words; by the sum of the losses of so many slices, as gradients over dp are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / slices)
    for _ in range(3):
        optimizer.zero_grad()
        (slices * loss_of(model, ids)).backward()
        optimizer.step()


def whole(model: Any) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.full_state_dict().items()}


def on_a_mesh(rank: int, world: int, group: Any, folder: str) -> Any:
    """Delayed: states after three steps, of a module that read a checkpoint of it, and of both after three more;
    tensorwise: the gradients of one step."""
    mesh, ids = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.arange(32).view(4, 8)
    mine = ids.chunk(2)[mesh["dp"].get_local_rank()]
    made = [compiled("delayed", mine, mesh=mesh, dp=2) for _ in range(2)]
    steps(made[0], mine)
    found = [whole(made[0])]
    made[0].save_checkpoint(folder)
    made[1].load_checkpoint(folder)
    found.append(whole(made[1]))
    for model in made:
        steps(model, mine)
        found.append(whole(model))
    scaled = compiled("tensorwise", mine, mesh=mesh, dp=2)
    loss_of(scaled, mine).backward()
    return found, scaled.full_grad_dict()


@pytest.mark.ranks
def test_over_dp_and_tp_histories_are_of_all_ranks_and_saved_and_dynamic_scales_of_a_slice(pool, tmp_path):
    ids = torch.arange(32).view(4, 8)
    alone = compiled("delayed", ids, tp=1)
    wanted = []
    for _ in range(2):
        steps(alone, ids, 2)
        wanted.append({n: t.clone() for n, t in alone.state_dict().items()})
    slices = [compiled("tensorwise", ids, tp=1) for _ in range(2)]
    for model, own in zip(slices, ids.chunk(2), strict=True):
        loss_of(model, own).backward()
    for found, gradients in pool.run(on_a_mesh, str(tmp_path / "saved")):
        for name, grad in gradients.items():
            mean = torch.stack([model.get_parameter(name).grad for model in slices]).mean(0)
            assert difference(grad, mean) < 1e-10
        for states, one in zip(found, [wanted[0], wanted[0], wanted[1], wanted[1]], strict=True):
            assert states.keys() == one.keys() and any("float8_history" in n for n in one)
            assert max(difference(states[n], t) for n, t in one.items()) < 1e-10


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_over_sequences_largest_values_are_of_all_ranks(recipe):
    model, ids = words(torch.float32), torch.arange(32).view(2, 16)
    report = autotp.verify(model, 2, ids, cp=2, precision={**SMALL, "recipe": recipe})
    assert report and report.output_error < 1e-9, report
