"""The cache of a plan is what a call with `use_cache=True` leaves, of a model with few blocks and of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.cost import Cluster
from autotp.cost.cache import cache_of
from autotp.driver.compile import Staged, capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.driver.sweep import largest_batch
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.passes.shard.decide import decide
from autotp.passes.shard.planner import Builder

WIDTH, HEADS, SIZE, BATCH, LENGTH, FP32 = 16, 4, 4, 2, 8, 4
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Kept:
    """What the layers keep."""

    def __init__(self) -> None:
        self.latents: list[Tensor] = []
        self.sums: list[Tensor] = []


class Layer(nn.Module):
    """Attention to heads that are made anew of a latent, which alone is kept, or the last of it; a wide layer keeps a
    sum too."""

    def __init__(self, wide: bool, window: int) -> None:
        super().__init__()
        self.window = window
        self.down, self.up = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, 2 * WIDTH)
        self.q, self.o, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), wide

    def forward(self, x: Tensor, kept: Kept | None) -> Tensor:
        latent = self.down(x)
        if kept is not None:
            kept.latents.append(latent[:, -self.window :])
            kept.sums += [x.sum(1)] if self.wide else []
        q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q(x), *self.up(latent).chunk(2, -1)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two wide layers, and others; `way` is what a call with a cache does besides."""

    def __init__(self, way: str = "", depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(i < 2, 4 if way == "window" and i > 1 else 0) for i in range(depth)])
        self.way, self.depth = way, depth

    def forward(self, x: Tensor, use_cache: bool = False) -> Any:
        kept = Kept() if use_cache else None
        if use_cache and self.way == "fails":
            raise ValueError("there is none")
        layers = [self.layers[i] for i in range(self.depth)] if self.way == "counts" else self.layers
        for layer in layers:
            x = layer(x, kept)
        if kept is None:
            return x
        return (x, [*kept.latents, *kept.sums]) if self.way == "list" else (x, kept)


def staged(way: str = "", tp: int = 1, objective: str = "prefill") -> tuple[Capture, Staged]:
    captured, notes = capture_model(Model(way), Inputs(X), torch.device("cpu"), False)
    return captured, plan_stages(captured, notes, Options.read(tp, Steering(objective=objective)), "Model")


LATENTS = 6 * BATCH * LENGTH * SIZE * FP32
SUMS = 2 * BATCH * WIDTH * FP32


def test_blocks_that_are_left_out_count_as_their_like():
    captured, found = staged()
    begun = captured.begun[0]
    assert sorted(begun.times.values()) == [1] * 6 + [3]  # the output; sums and latents of two wide layers; two others
    assert begun.like == {"layers.4": "layers.2", "layers.5": "layers.2"}
    memory = found.plan.memory
    assert memory.cache == LATENTS + SUMS
    assert memory.cache_token == 6 * SIZE * FP32 and memory.cache_sequence == 2 * WIDTH * FP32
    assert "cache   96 B per token and rank, 128 B per sequence and rank" in str(found.plan)
    once = cache_of(decide(Builder(begun.program, 1, Cluster.resolve(None))), begun.program.hints)
    assert once is not None and once.bytes == LATENTS * 4 / 6 + SUMS  # were each of them one


def test_a_forward_that_counts_its_blocks_is_captured_with_all():
    captured, found = staged("counts")
    begun = captured.begun[0]
    assert set(begun.times.values()) == {1} and not begun.like and len(begun.times) == 1 + 6 + 2
    assert found.plan.memory.cache == LATENTS + SUMS


def test_a_cache_that_is_a_plain_list_is_held_whole():
    for tp in (1, 2):
        memory = staged("list", tp)[1].plan.memory
        assert memory.cache == LATENTS + SUMS and memory.cache_sequence == 2 * WIDTH * FP32


def test_what_cannot_be_captured_is_a_guess_and_said():
    captured, found = staged("fails")
    assert "there is none" in captured.begun[0]
    heads = 6 * 2 * BATCH * LENGTH * WIDTH * FP32  # keys and values as they enter the attentions
    assert found.plan.memory.cache == heads > LATENTS + SUMS
    assert any("the cache is a guess" in note and "there is none" in note for note in found.plan.notes)
    assert not any("guess" in note for note in staged()[1].plan.notes)


def test_training_captures_no_cache():
    captured, found = staged(objective="training")
    assert captured.begun is None and found.plan.memory.cache == 0


def test_a_data_parallel_rank_has_its_own_sequences():
    """The example inputs are one rank's."""
    plans = [
        autotp.plan(Model(), 1, dp=dp, example_inputs=X, objective="prefill", check_capture=False) for dp in (1, 2)
    ]
    assert [p.memory.cache for p in plans] == [LATENTS + SUMS] * 2
    assert len({(p.memory.cache_token, p.memory.cache_sequence) for p in plans}) == 1


# ---- what a step of decoding reads -----------------------------------------------------------------------------------


def step(way: str, length: int) -> Staged:
    captured, notes = capture_model(Model(way), Inputs(X[:, :1].repeat(1, length, 1)), torch.device("cpu"), False)
    return plan_stages(captured, notes, Options.read(1, Steering(objective="decode")), "Model")


def test_a_step_makes_the_heads_of_all_latents():
    """Where it is known that latents are kept, and of those that are; what is kept by a guess is made of one token."""
    longer = {}
    for way in ("", "window", "fails"):
        flops = [step(way, n).plan.totals.flops for n in (64, 128)]
        longer[way] = (flops[1] - flops[0]) / 64
    scores = 2 * 2 * BATCH * WIDTH  # of a token's queries with a key, and of its weights with a value
    heads = 2 * BATCH * SIZE * 2 * WIDTH
    assert longer == {"": 6 * (scores + heads), "window": 2 * (scores + heads), "fails": 6 * scores}


def test_what_is_made_of_the_latents_is_in_the_working_set():
    known, guess = (step(way, 4096).plan.memory for way in ("", "fails"))
    made = 2 * BATCH * 4096 * WIDTH * FP32
    assert known.working >= made > guess.working
    batches = [largest_batch(step(way, 4096), 1e8) for way in ("", "fails")]
    assert batches[0] == pytest.approx((1e8 - 2e4) / (known.cache + made) * BATCH, rel=0.1) != batches[1]
