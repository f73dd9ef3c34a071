"""Sizes of a state that the forward that made it had as numbers, and that no later forward asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.ir.carried import states_of

HEADS, SIZE = 2, 4


class Crossed(nn.Module):
    """Attention to keys that the first call leaves in a cache; how many heads they have it never asks again."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, HEADS * SIZE), nn.Linear(8, HEADS * SIZE)

    def forward(self, x: Tensor, seen: Tensor, cache: Any = None) -> Tensor:
        cache = SimpleNamespace(keys=None) if cache is None else cache
        if cache.keys is None:
            cache.keys = self.k(seen).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).contiguous()
        flat = (x.shape[0] * HEADS, -1, SIZE)
        q = self.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).reshape(flat)
        return (q @ cache.keys.reshape(flat).transpose(1, 2)).softmax(-1)


@pytest.mark.parametrize("seen_tokens", [7, 1])  # a length of 1 is captured in another way
def test_a_number_of_heads_stays_a_number_and_a_length_does_not(seen_tokens):
    torch.manual_seed(0)
    model, cache = Crossed(), SimpleNamespace(keys=None)
    wanted = SimpleNamespace(keys=None)
    x, seen = torch.randn(3, 5, 8), torch.randn(3, seen_tokens, 8)
    sharded: Any = autotp.compile(model, 1, example_inputs=(x, seen))
    for length in (5, 6, 4):
        x = torch.randn(3, length, 8)
        with torch.no_grad():
            assert torch.equal(sharded(x, seen, cache), model(x, seen, wanted))
    programs = list(sharded._programs_made)
    capture = programs[-1].capture
    (at,) = states_of(capture.in_spec)
    shapes = {x.name: tuple(x.node.meta["val"].shape) for x in capture.inputs}
    batch, heads, seen_length, size = shapes["cache.keys"]
    assert (heads, size) == (HEADS, SIZE) and all(type(n) is int for n in (heads, size)), (at, shapes)
    assert not isinstance(batch, int) and not isinstance(seen_length, int)
    assert len(programs) <= 3


class Counts(nn.Module):
    """Keeps keys and values, and takes how many these are as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(8, HEADS * SIZE), nn.Linear(8, HEADS * SIZE)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache = SimpleNamespace(keys=None, values=None) if cache is None else cache
        past = 0 if cache.keys is None else cache.keys.shape[-2]
        place = torch.ones(1, 1, dtype=torch.long) * int(past + x.shape[1]) if past != 0 else torch.ones(1, 1)
        k, v = (layer(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for layer in (self.k, self.v))
        cache.keys = k if cache.keys is None else torch.cat((cache.keys, k), 2)
        cache.values = v if cache.values is None else torch.cat((cache.values, v), 2)
        scores = torch.einsum("bhqc,bhck->bhqk", k, cache.keys.transpose(2, 3))
        return torch.einsum("bhqk,bhkc->bhqc", scores.softmax(-1), cache.values) * place


def test_a_length_that_is_taken_as_a_number_is_that_of_each_call():
    """With a state of length 1 torch may note nothing of `int(length)`: later calls had the first one's number."""
    torch.manual_seed(0)
    model, cache, wanted = Counts(), SimpleNamespace(keys=None, values=None), SimpleNamespace(keys=None, values=None)
    sharded: Any = autotp.compile(model, 1, example_inputs=(torch.randn(3, 1, 8),))
    for _ in range(4):
        x = torch.randn(3, 1, 8)
        with torch.no_grad():
            assert torch.equal(sharded(x, cache), model(x, wanted))


class Adds(nn.Module):
    """Adds to what a cache holds, and gives the rows' sums in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache = SimpleNamespace(total=torch.zeros_like(x)) if cache is None else cache
        cache.total = cache.total + self.layer(x)
        if self.way == "branches" and x.shape[0] == 1:
            return 2 * cache.total.sum(1)
        sums = cache.total.sum(1, keepdim=True)
        sums = sums.squeeze() if self.way == "squeezes" else sums.squeeze(1)
        return sums.reshape(sums.shape[0], -1)


@pytest.mark.parametrize(("way", "programs"), [("plain", 1), ("branches", 2), ("squeezes", 2)])
@pytest.mark.parametrize("batches", [(3, 1, 2), (1, 4)])
def test_one_program_is_for_a_batch_of_one_too_where_the_model_does_the_same(way, programs, batches):
    torch.manual_seed(0)
    model = Adds(way)

    def call(rows: int) -> tuple[Tensor, Any]:
        return torch.randn(rows, 5, 8), SimpleNamespace(total=torch.randn(rows, 5, 8))

    sharded: Any = autotp.compile(model, 1, example_inputs=call(6)[:1], check_capture=False)
    before = len(sharded._programs_made)
    with torch.no_grad():
        for rows in batches:
            x, cache = call(rows)
            wanted = model(x, SimpleNamespace(total=cache.total))
            assert torch.equal(sharded(x, cache), wanted), rows
    assert len(sharded._programs_made) - before <= programs
