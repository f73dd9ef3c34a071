"""Parts that are called by themselves, as recipes of multimodal models call the embedding and the head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autotp
from autotp.errors import StateError
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.errors import error_of

IDS = torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(0))
EXACT = 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Words(nn.Module):
    """A language model with one weight for its table and its head, and what recipes ask of such."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.table.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor | None = None, embeds: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(self.table(ids) if embeds is None else embeds))

    def generate(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)


def words() -> Any:
    torch.manual_seed(0)
    return Words().double()


def recipe(model: Any, ids: Tensor) -> list[Tensor]:
    """What a recipe computes by parts, and has a gradient of: the table's alone, then one of all that was called."""
    only = model.get_input_embeddings()(ids)
    only.square().mean().backward()
    embeds = model.get_input_embeddings()(ids) * torch.arange(5)[:, None]
    hidden = model.blocks[0](x=embeds)
    out = model(embeds=embeds)
    (out.square().mean() + model.head(hidden).mean()).backward()
    return [x.detach() for x in (only, hidden, model.hidden(embeds), out)]


def by_parts(model: Any, sharded: Any, rows: slice) -> dict[str, Any]:
    pairs = zip(recipe(sharded, IDS[rows]), recipe(model, IDS), strict=True)
    found: dict[str, Any] = {str(i): difference(own, wanted[rows]) for i, (own, wanted) in enumerate(pairs)}
    return found | {"gradients": gradients_differ(sharded, model)}


def over_tp(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Differences by parts, what hooks see, and errors."""
    model = words()
    options = {"pins": {"table.weight": Shard(0)}, "check_capture": False}  # by vocabulary
    sharded: Any = autotp.compile(model, example_inputs=IDS, mesh=mesh_of(group), **options)
    found = by_parts(model, sharded, slice(None))
    seen: list[Tensor] = []
    for m in (model, sharded):
        handle = m.blocks[0].register_forward_hook(lambda block, args, x: seen.append(x))
        m(IDS)
        m.blocks[0](m.table(IDS))
        handle.remove()
    found["seen"] = max(difference(own, wanted) for own, wanted in zip(seen[2:], seen[:2], strict=True))
    handle = sharded.blocks[1].register_forward_hook(lambda block, args, x: sharded.head(x) if rank else None)
    found["hooked"] = error_of(lambda: sharded(IDS))[:2]
    handle.remove()
    found["parted"] = error_of(lambda: (sharded.head if rank else sharded.blocks[0])(seen[0]))[:2]
    found["after"] = difference(sharded(IDS), model(IDS))
    sharded.blocks[1] = Forgetful(sharded.blocks[1])
    found["forgetful"] = error_of(lambda: sharded(IDS))[:2]
    return found


class Forgetful(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args)


class Doubled(Forgetful):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs) * 2


def test_what_stands_in_their_place_and_copies():
    model, x = words(), torch.randn(2, 5, 8, dtype=torch.float64)
    sharded: Any = autotp.compile(model, 1, example_inputs=IDS, check_capture=False)
    copied = copy.deepcopy(sharded)
    for m in (model, sharded):
        m.blocks[0] = Doubled(m.blocks[0])
    assert torch.equal(sharded.blocks[0](x), model.blocks[0](x))
    assert torch.equal(sharded.blocks[0].layer(x), model.blocks[0].layer(x))
    assert torch.equal(sharded(IDS), model(IDS))
    with torch.no_grad():
        copied.table.weight.zero_()
    assert not copied.table(IDS).any() and sharded.table(IDS).all()
    with pytest.raises(StateError, match="copy of one part"):
        copy.deepcopy(copied.head)(x)
    with pytest.raises(NotImplementedError, match="ModuleList"):
        copied.blocks(x)


class Loss(Words):
    def forward(self, ids: Tensor | None = None, embeds: Tensor | None = None) -> Tensor:
        return super().forward(ids, embeds).mean()


def test_their_outputs_are_whole_whatever_is_asked_of_the_modules():
    model = Loss()
    sharded: Any = autotp.compile(model, 1, example_inputs=IDS, outputs="loss", check_capture=False)
    assert torch.equal(sharded.table(IDS), model.table(IDS)) and torch.equal(sharded(IDS), model(IDS))


def test_they_compute_what_the_originals_do(pool):
    for rank, found in enumerate(pool.run(over_tp, world=2)):
        kind, text = found.pop("hooked")
        assert kind == ("StateError" if rank else "RankError") and "call head after that call" in text, text
        kind, text = found.pop("parted")
        assert kind == "RankError" and "rank 0: blocks.0, rank 1: head" in text, text
        kind, text = found.pop("forgetful")
        assert kind == "StateError" and "def forward(self, *args, **kwargs): return self.layer(*args, **kwargs)" in text
        assert max(found.values()) < EXACT, found


def over_dp(rank: int, world: int, group: Any) -> list[Any]:
    """Likewise with weights that are gathered over dp, after a call of `generate()` before any forward."""
    found = []
    for fully_shard in (False, True):
        model, mesh = words(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        options = {"mesh": mesh, "dp": 2, "fully_shard": fully_shard, "check_capture": False}
        sharded: Any = autotp.compile(model, example_inputs=IDS, **options)
        rows = slice(rank, rank + 1)
        same = torch.equal(sharded.generate(IDS[rows]), model.generate(IDS[rows]))
        found.append((same, by_parts(model, sharded, rows)))
    return found


def test_with_dp_their_weights_are_gathered(pool):
    for found in pool.run(over_dp, world=2):
        for same, differences in found:
            assert same and max(differences.values()) < EXACT, found
