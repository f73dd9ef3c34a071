"""dp beside cp, and what trains with them: dropout, checkpointing, float8 and adapters, against one device."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autotp
from autotp.errors import InputError
from tests.helpers.compare import difference, gradients_differ
from tests.helpers.models import transformer
from tests.helpers.modules.float8 import SMALL, sharded, words
from tests.helpers.modules.two_axes import slice_of

TOKENS = torch.arange(64).view(4, 16) % 32
WHOLE = {"input_ids": TOKENS, "labels": TOKENS}


def mesh_of() -> tuple[DeviceMesh, int, int]:
    """A mesh of 2 x 2, and this rank's place on dp and on cp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return mesh, mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()


def small() -> Any:
    return transformer("llama-short").double().train()


class Scores(nn.Module):
    """The words' scores, as a value of their own: torch warns of a module whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.words = words(torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) * 1.0


class Dropping(nn.Module):
    """A feed-forward layer whose dropout shows in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.drop = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.up(self.table(ids)).square() + 1)


def dropped(rank: int, world: int, group: Any) -> list[Tensor]:
    """What two calls with one seed drop of a part, all sequences and parts of which are equal; and what one device
    drops of a slice, of which it takes that part."""
    mesh, _, part = mesh_of()
    rows = torch.zeros(2, 16, dtype=torch.long)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "tp"))
    masks = []
    for axes, times in ((mesh, 2), (alone["tp"], 1)):
        torch.manual_seed(3)
        model: Any = autotp.compile(Dropping().double(), axes, example_inputs=rows)
        for _ in range(times):
            torch.manual_seed(rank if times == 2 and rank % 2 else 7)  # the others of a slice take its first one's
            masks.append(model(rows).detach() != 0)
    return [*masks[:2], autotp.Inputs(masks[2]).part(part, 2).args[0]]


def test_every_part_has_its_own_of_the_masks_of_a_slice(pool):
    masks = pool.run(dropped)
    for first, again, _ in masks:
        assert torch.equal(first, again) and 0.4 < first.double().mean() < 0.6
    for i in range(4):
        assert not any(torch.equal(masks[i][0], masks[j][0]) for j in range(i))
        assert torch.equal(masks[i][0], masks[i][2]) == (i < 2)  # dp rank 0 draws as one device does


def checkpointed(rank: int, world: int, group: Any) -> dict[str, float]:
    """transformers' own switch, on dp x cp, with weights split over both."""
    mesh, at, _ = mesh_of()
    model: Any = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another name for it will come
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parallel: Any = autotp.compile(
        model, mesh, fully_shard=True, example_inputs=slice_of(WHOLE, at), check_capture=False
    )
    losses = model(**WHOLE).loss, parallel(**slice_of(WHOLE, at)).loss
    for loss in losses:
        loss.backward()
    return {"loss": difference(*losses), "gradients": gradients_differ(parallel, model)}


def test_checkpointing_on_both_axes(pool):
    for found in pool.run(checkpointed):
        assert found.pop("loss") < 1e-6 and max(found.values()) < 1e-10, found  # transformers takes losses in float32


def scaled(rank: int, world: int, group: Any, recipe: str) -> dict[str, float]:
    """Two steps: the loss of a rank's tokens, of which gradients are the mean."""
    mesh, at, part = mesh_of()
    parallel = sharded(Scores(), recipe, TOKENS.chunk(2)[at], mesh=mesh, dp=2, cp=2)
    alone = sharded(Scores(), recipe, TOKENS, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "tp")))
    found = {}
    for step in range(2):
        for model, ids in ((parallel, TOKENS.chunk(2)[at]), (alone, TOKENS)):
            scores, wanted = model(ids), TOKENS.roll(-1, 1)
            own = wanted if model is alone else autotp.Inputs(wanted.chunk(2)[at]).part(part, 2).args[0]
            nn.functional.cross_entropy(scores.flatten(0, 1), own.flatten()).backward()
        mine, theirs = parallel.full_grad_dict(), alone.full_grad_dict()
        found |= {f"{step} {name}": difference(mine[name], grad) for name, grad in theirs.items()}
        with torch.no_grad():
            for model in (parallel, alone):
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_float8_on_both_axes(pool, recipe):
    for found in pool.run(scaled, recipe):
        assert max(found.values()) < 1e-10, found


def adapted(rank: int, world: int, group: Any) -> dict[str, float]:
    """LoRA: gradients of the adapters alone."""
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by peft
    mesh, at, _ = mesh_of()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(small(), config)
    parallel: Any = autotp.compile(model, mesh, example_inputs=slice_of(WHOLE, at), check_capture=False)
    losses = model(**WHOLE).loss, parallel(**slice_of(WHOLE, at)).loss
    for loss in losses:
        loss.backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    grads = parallel.full_grad_dict()
    assert trained and {n for n, g in grads.items() if g is not None} == set(trained)
    return {"loss": difference(*losses)} | {n: difference(grads[n], model.get_parameter(n).grad) for n in trained}


def test_adapters_on_both_axes(pool):
    for found in pool.run(adapted):
        assert found.pop("loss") < 1e-6 and max(found.values()) < 1e-10, found


def test_scales_of_a_slice_are_no_scales_of_one_device():
    with pytest.raises(InputError, match="largest values of a rank's slice"):
        autotp.verify(words(torch.float32), 2, TOKENS, dp=2, precision={**SMALL, "recipe": "tensorwise"})
    assert autotp.verify(words(torch.float32), 2, TOKENS, dp=2, precision={**SMALL, "recipe": "delayed"})
