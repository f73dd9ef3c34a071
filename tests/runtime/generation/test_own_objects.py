"""Objects that hold state and that the forward makes, writes to and decides by, on ranks that hold parts of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError
from autotp.passes.canonicalise import functionalise
from tests.helpers.compare import mesh_of

HEADS, SIZE, KEPT = 4, 4, 3


class Own(nn.Module):
    """Makes its cache itself, and halves its answer from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.out = nn.Linear(8, HEADS * SIZE), nn.Linear(HEADS * SIZE, 8)

    def forward(self, x: Tensor, cache: Any = None, use_cache: bool = False) -> dict[str, Any]:
        keys = 0 if cache is None else cache.keys.shape[2]
        k = self.k(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        if cache is None:
            cache = SimpleNamespace(keys=k, calls=torch.zeros((), dtype=torch.long))
        else:
            cache.keys = torch.cat((cache.keys, k), 2)
        cache.calls = cache.calls + 1
        scores = (k @ cache.keys.transpose(2, 3)).softmax(-1)
        y = self.out((scores @ cache.keys).transpose(1, 2).flatten(2))
        halved = keys > 0 and bool(cache.calls > 1)
        y = y / 2 if halved else y
        return {"y": y, "cache": cache} if use_cache else {"y": y}


def decoded(rank: int, world: int, group: Any) -> tuple[list[float], list[float], Any]:
    torch.manual_seed(0)
    model = Own().double()
    inputs = [torch.randn(2, length, 8, dtype=torch.double) for length in (5, 3)]
    sharded: Any = autotp.compile(
        model, example_inputs=(inputs[0],), mesh=mesh_of(group), check=True, check_capture=False
    )
    gaps, controls = list[float](), list[float]()
    own: Any = None
    mine: Any = None
    for x in inputs:
        with torch.no_grad():
            wanted, got = model(x, own, use_cache=True), sharded(x, mine, use_cache=True)
        own, mine = wanted["cache"], got["cache"]
        gaps.append(float((wanted["y"] - got["y"]).abs().max()))
        controls.append(float((wanted["y"] * 2 - got["y"]).abs().max()))
    return gaps, controls, tuple(mine.keys.shape)


def test_what_a_forward_makes_is_known_when_it_is_passed_and_branches_on_its_numbers(pool):
    for gaps, controls, shape in pool.run(decoded, world=2):
        assert max(gaps) < 1e-12 and min(controls) > 1e-3, (gaps, controls)
        assert shape == (2, HEADS // 2, 8, SIZE)


class Judging(nn.Module):
    """Branches on a value of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        if state is None:
            return x
        grown = bool((state.h > 0).all())
        state.h = state.h + self.linear(x)
        return x * 2 if grown else x


def test_a_branch_on_what_a_rank_may_have_a_part_of_is_refused():
    sharded: Any = autotp.compile(Judging(), 1, example_inputs=(torch.zeros(3, 8),))
    with torch.no_grad(), pytest.raises(CaptureError, match="depends on the values of the state state_0, of which a"):
        sharded(torch.zeros(3, 8), SimpleNamespace(h=torch.zeros(3, 8)))


class Convolved(nn.Module):
    """A convolution over the last inputs, which it keeps: nothing but the result reads what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, KEPT + 1))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        joined = torch.cat((kept, x), -1)
        kept.copy_(joined[:, :, -KEPT:])
        x = x.clone().mul_(2)
        return x + F.conv1d(joined, self.weight, groups=8)[:, :, -x.shape[-1] :]


class Stack(nn.Module):
    """Two equal layers, which are both given what carries gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.layers = nn.ModuleList([Convolved(), Convolved()])

    def forward(self, x: Tensor, cache: Any = None, use_cache: bool = False) -> Any:
        cache = SimpleNamespace(kept=[x.new_zeros(len(x), 8, KEPT) for _ in range(2)]) if cache is None else cache
        x = x * self.scale
        for layer, kept in zip(self.layers, cache.kept, strict=True):
            x = layer(x, kept)
        return {"x": x, "cache": cache} if use_cache else x


def test_writes_of_equal_layers_may_stand_in_any_order(monkeypatch):
    """What is traced a second time has its last writes at the end, in reverse."""
    monkeypatch.setattr(functionalise._Memory, "rewrite", lambda *_: False)
    monkeypatch.setattr(functionalise._Memory, "rewrite_part", lambda *_: False)
    torch.manual_seed(0)
    model, own, mine = Stack().double(), None, None
    x = torch.randn(2, 8, 1, dtype=torch.double)
    sharded: Any = autotp.compile(model, 1, example_inputs=(x,))
    for _ in range(3):
        with torch.no_grad():
            wanted, got = model(x, own, use_cache=True), sharded(x, mine, use_cache=True)
        own, mine = wanted["cache"], got["cache"]
        assert torch.equal(got["x"], wanted["x"]) and torch.equal(mine.kept[1], own.kept[1])
