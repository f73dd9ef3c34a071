"""Prefill and decoding on simulated ranks are one forward of all tokens, and what differs is named."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.capture.request import CaptureRequest
from autotp.driver.decoded_calls import Generated, calls_of
from autotp.driver.decoding import compared, explained
from autotp.driver.options import Options
from autotp.driver.simulated import DecodedModel
from autotp.errors import InputError
from autotp.inputs import Inputs
from autotp.kernels.attention import attend, cached_attention
from autotp.proof.run import CallLayouts
from tests.helpers.modules.carried import CARRIED, Attention, tokens

NEW, KEYS = 3, "past_key_values.layers.0.keys"


def prompt() -> dict[str, torch.Tensor]:
    """Two rows, the first padded on the left."""
    ids, mask = torch.arange(5, 17).view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Decoding:
    """A model decoded on two simulated ranks again and again, by programs that are captured once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
        plan = autotp.plan(model, 2, example_inputs=prompt(), check_capture=False)
        request = CaptureRequest.read(1, "full", "counter")
        self.simulated = DecodedModel(model, plan, Options.of_plan(plan), request, lambda x: self.calls.rows(x))
        self.calls: Any = calls_of(model, self.simulated.bare, Inputs(**prompt()), NEW, ())
        self.calls.decode(self.simulated.call)
        self.steps = self.simulated.restart(ranks=False)
        self.calls.forward(self.simulated.call)
        self.forward = self.simulated.restart(ranks=True)[0]

    def again(self) -> Any:
        """Decode once more, and compare."""
        self.calls.decode(self.simulated.call)
        return compared(self.simulated.restart(ranks=True), self.forward, self.calls.token_positions(), 6)


@pytest.fixture(scope="module")
def decoding() -> Decoding:
    return Decoding()


def test_what_is_decoded_is_one_forward(decoding):
    found = compared(decoding.steps, decoding.forward, decoding.calls.token_positions(), 6)
    assert found.difference is None and found.logits_error < 1e-12 and found.cache_error < 1e-12
    assert (found.prompt, found.tokens, found.positions, found.states) == (6, NEW, 6 + NEW, 2)
    assert len(decoding.simulated.programs) == 2  # without a past, and with one
    parts = decoding.steps[-1].states[KEYS].parts.ranks
    assert [x.shape for x in parts] == [(2, 2, 6 + NEW, 4)] * 2  # heads of each rank
    said = str(found)
    assert "prefill of 6 and decoding of 3 tokens equal the forward of 9: logits of 9 positions" in said
    assert "2 cached tensors, each rank's parts put together" in said


def test_attention_over_a_cache_is_proved_as_it_runs(decoding):
    assert decoding.simulated.rewritten > 0
    calls = [n for p in decoding.simulated.programs for n in p.graph.nodes if n.target in (attend, cached_attention)]
    assert len(calls) == decoding.simulated.rewritten
    changed = calls[-1]
    args, changed.args = changed.args, (*changed.args[:-1], 0.7)  # another scale, which the captured graph has not
    try:
        found = decoding.again()
    finally:
        changed.args = args
    assert found.difference is not None and "decoded token" in found.difference.detail
    assert decoding.again().difference is None


def test_an_entry_of_the_cache_of_one_rank_that_changes_is_named(decoding):
    parts = DecodedModel._parts

    def changed(self: Any, *args: Any) -> Any:
        found = parts(self, *args)
        if len(self.steps) == 2:  # before the second decoded token
            found[KEYS] = [x.clone() for x in found[KEYS]]
            found[KEYS][1][1, 0, 4, 2] += 1e-3
        return found

    with patch.object(DecodedModel, "_parts", changed):
        found = decoding.again()
    assert found.difference.value == KEYS
    assert "after decoded token 2, at position 7 the ranks' parts are off by" in found.difference.detail
    assert "most at [1, 2, 4, 2]" in found.difference.detail  # head 0 of rank 1 is the third of all
    assert found.cache_error > 1e-9 and found.logits_error > 1e-9 and "differs (decoding) at" in str(found)


def test_a_position_off_by_one_on_the_ranks_is_named(decoding):
    dealt = CallLayouts.dealt

    def later(self: Any, leaf: Any, node: Any) -> Any:
        parts = dealt(self, leaf, node)
        return [x + 1 for x in parts] if leaf.name == "position_ids" and parts[0].shape[1] == 1 else parts

    with patch.object(CallLayouts, "dealt", later):
        found = decoding.again()
    assert "after decoded token 1, at position 6 the ranks' parts are off by" in found.difference.detail
    assert found.logits_error > 1e-9


def test_a_position_off_by_one_of_the_original_is_told_apart(decoding):
    call = decoding.simulated.call

    def later(entry: str, args: Any, kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            kwargs = {**kwargs, "position_ids": kwargs["position_ids"] + 1}
        return call(entry, args, kwargs)

    with patch.object(decoding.simulated, "call", later):
        found = decoding.again()
    assert "from one forward of all tokens, unsharded too" in found.difference.detail
    far = explained(found.difference, gap=1e-7, alone=0.3, tolerance=1e-5)
    assert far is not None
    assert "so is the model itself, whose decoding is off by 3.0e-01 from its forward" in far.detail
    assert "the ranks compute what its decoding does, within 1.0e-07" in far.detail
    near = explained(found.difference, gap=1e-7, alone=1e-7, tolerance=1e-5)
    assert near is not None and "so is the model itself" not in near.detail
    other = explained(found.difference, gap=0.2, alone=0.3, tolerance=1e-5)  # the programs are not the model's decoding
    assert other is not None and other.direction == "capture" and "what its decoding does" not in other.detail


def test_states_that_are_named_are_decoded_by_themselves():
    report = autotp.verify(Attention(), 2, (tokens(5),), carried=CARRIED, generate=3)
    assert report and report.decoded is not None and report.decoded.difference is None
    assert (report.decoded.positions, report.decoded.states) == (8, 2)
    assert "equal at tp=2" in str(report) and "decoding of 3 tokens equal the forward of 8" in str(report)


def test_what_carries_nothing_is_refused():
    with pytest.raises(InputError, match="Linear carries nothing from call to call") as caught:
        autotp.verify(nn.Linear(4, 4), 2, torch.ones(2, 4), generate=2)
    assert "give carried, such as {1: 'past_k', 2: 'past_v'}" in str(caught.value)
    for count in (0, True, "16"):
        with pytest.raises(InputError, match="give how many tokens to decode"):
            autotp.verify(nn.Linear(4, 4), 2, torch.ones(2, 4), generate=count)  # type: ignore[arg-type]


def test_tokens_that_end_a_sequence_are_not_decoded(decoding):
    bare = decoding.simulated.bare
    bare.generation_config.eos_token_id = [5, 6, 7]
    found = Generated(bare, prompt(), NEW).tokens
    bare.generation_config.eos_token_id = 1
    assert found.shape == (2, NEW + 1) and int(found.min()) > 7
