"""Forwards that read what an earlier call left in plain attributes are refused where no comparison would show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import autotp
from autotp.errors import CaptureError

X = torch.randn(4, 8)


class Two(nn.Module):
    """Two products, and an attribute beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.left: Any = None

    def both(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Sums(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.left = self.both(x) if self.left is None else self.left + self.both(x)
        return self.left


class InPair(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x) if self.left is None else self.both(x) * self.left[1]
        self.left = x, y
        return y


class Writes(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.left = self.both(x)
        return self.left * 2


@pytest.mark.parametrize("kind", [Sums, InPair])
def test_what_an_earlier_call_left_is_not_lost_in_silence(kind: type[Two]):
    model = kind()
    model.eval()
    with pytest.raises(CaptureError, match=r"plain attributes of its modules \(left\).*register it as a buffer"):
        autotp.compile(model, 1, example_inputs=(X,), check_capture=False)
    assert model.left is None


def test_what_is_written_and_never_read_is_no_state():
    model = Writes()
    sharded = autotp.compile(model, 1, example_inputs=(X,), check_capture=False)
    for x in (X, 2 * X):
        assert torch.equal(sharded(x), model(x))


def test_states_outside_of_the_cache_are_named():
    config = RecurrentGemmaConfig(
        num_hidden_layers=2, block_types=["recurrent", "attention"], vocab_size=32, hidden_size=16,
        intermediate_size=32, num_attention_heads=2, lru_width=16, attention_window_size=8,
    )  # fmt: skip
    model = RecurrentGemmaForCausalLM(config).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    sharded = autotp.compile(model, 1, example_inputs={"input_ids": ids})
    with pytest.raises(CaptureError, match=r"conv1d_state.*use_cache=False"):
        sharded.generate(ids, max_new_tokens=3, do_sample=False)
