"""Every call of decoding is proved on simulated ranks, and what differs is named."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.capture.request import CaptureRequest
from autotp.driver.compile import apply_plan
from autotp.driver.decoding import Decoding, generate
from autotp.driver.options import Options
from autotp.errors import InputError
from autotp.inputs import Inputs
from autotp.ir.layouts import R
from autotp.kernels.attention import attend, cached_attention
from autotp.proof.run import CallLayouts
from tests.helpers.modules.carried import CARRIED, Attention, tokens

NEW, KEYS = 3, "past_key_values.layers.0.keys"


def prompt() -> dict[str, torch.Tensor]:
    """Two rows, the first padded on the left."""
    ids, mask = torch.arange(5, 17).view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Decoded:
    """A model decoded on two simulated ranks again and again, by programs that are captured once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
        plan = autotp.plan(self.model, 2, example_inputs=prompt(), check_capture=False)
        request = CaptureRequest()
        self.proof = Decoding(self.model, plan, Options.of_plan(plan), request, 1e-5)

    def again(self) -> Any:
        """Decode once more."""
        self.proof.difference, self.proof.calls = None, 0
        generate(self.proof.bare, Inputs(**prompt()), NEW, (), self.proof.call)
        return self.proof.summary(NEW)


@pytest.fixture(scope="module")
def decoding() -> Decoded:
    made = Decoded()
    made.again()
    return made


def test_every_call_is_equal_on_the_ranks(decoding):
    found = decoding.again()
    assert found.difference is None and found.error < 1e-12 and found.model_error < 1e-5
    assert (found.tokens, found.calls, found.states) == (NEW, 1 + NEW, 2)
    assert len(decoding.proof.programs) == 2  # without a past, and with one
    assert decoding.proof.layouts[KEYS].sharded_dim == 1  # heads of each rank
    assert "a prefill and 3 decoded tokens are equal: outputs and 2 cached tensors" in str(found)


def test_attention_over_a_cache_is_proved_as_it_runs(decoding):
    calls = [n for p in decoding.proof.programs for n in p.graph.nodes if n.target in (attend, cached_attention)]
    assert calls
    changed = calls[-1]
    args, changed.args = changed.args, (*changed.args[:-1], 0.7)  # another scale, which the captured graph has not
    try:
        found = decoding.again()
    finally:
        changed.args = args
    assert found.difference is not None and "in the call of decoded token 1" in found.difference.detail
    assert decoding.again().difference is None


def test_an_entry_of_the_cache_of_one_rank_that_changes_is_named(decoding):
    dealt = CallLayouts.dealt

    def changed(self: Any, leaf: Any, node: Any) -> Any:
        parts = dealt(self, leaf, node)
        if leaf.name == KEYS and decoding.proof.calls == 2:  # in the call of the second decoded token
            parts = [x.clone() for x in parts]
            parts[1][1, 0, 4, 2] += 1e-3
        return parts

    with patch.object(CallLayouts, "dealt", changed):
        found = decoding.again()
    assert found.difference is not None and "in the call of decoded token 2" in found.difference.detail
    assert "differs (decoding) at" in str(found) and found.error > 1e-9


def test_a_position_off_by_one_on_the_ranks_is_named(decoding):
    dealt = CallLayouts.dealt

    def later(self: Any, leaf: Any, node: Any) -> Any:
        parts = dealt(self, leaf, node)
        return [x + 1 for x in parts] if leaf.name == "position_ids" and parts[0].shape[1] == 1 else parts

    with patch.object(CallLayouts, "dealt", later):
        found = decoding.again()
    assert found.difference is not None and "in the call of decoded token 1" in found.difference.detail


def test_a_captured_graph_that_is_not_the_model_is_told_apart(decoding):
    def scaled(module: Any, args: Any, output: Any) -> Any:
        return output * 1.01 if output.shape[1] == 1 else output

    hook = decoding.model.transformer.ln_f.register_forward_hook(scaled)  # after the capture
    try:
        found = decoding.again()
    finally:
        hook.remove()
    assert found.difference is not None and found.difference.direction == "capture"
    assert "for decoded token 1 is off by" in found.difference.detail and "from the model itself" in str(found)


def test_a_state_that_is_left_otherwise_than_it_is_taken_is_named(decoding):
    proof = decoding.proof
    programs, planned, layouts = list(proof.programs), list(proof.planned), dict(proof.layouts)

    def whole(*args: Any, **kwargs: Any) -> Any:
        planned, sharded = apply_plan(*args, **kwargs)
        sharded.states[KEYS] = R
        return planned, sharded

    del proof.programs[1:], proof.planned[1:]
    try:
        with patch("autotp.driver.decoding.apply_plan", whole):
            found = decoding.again()
    finally:
        proof.programs[:], proof.planned[:], proof.layouts = programs, planned, layouts
    assert found.difference is not None and found.difference.value == KEYS
    assert "and another takes it" in found.difference.detail


def test_states_that_are_named_are_decoded_by_themselves():
    report = autotp.verify(Attention(), 2, (tokens(5),), carried=CARRIED, generate=3)
    assert report and report.decoded is not None and report.decoded.difference is None
    assert (report.decoded.calls, report.decoded.states) == (4, 2)
    assert "equal at tp=2" in str(report) and "3 decoded tokens are equal" in str(report)


def test_what_decodes_in_float8_is_held_against_its_own_graph():
    torch.manual_seed(0)
    precision = {"recipe": "tensorwise", "smallest": 1}
    report = autotp.verify(Attention(), 2, (tokens(5),), carried=CARRIED, generate=1, precision=precision)
    assert report and report.decoded is not None and report.decoded.model_error is None
    assert "were not compared with the model, which does not round so" in str(report)


def test_what_carries_nothing_is_refused():
    with pytest.raises(InputError, match="Linear carries nothing from call to call") as caught:
        autotp.verify(nn.Linear(4, 4), 2, torch.ones(2, 4), generate=2)
    assert "give carried, such as {1: 'past_k', 2: 'past_v'}" in str(caught.value)
    for count in (0, True, "16"):
        with pytest.raises(InputError, match="give how many tokens to decode"):
            autotp.verify(nn.Linear(4, 4), 2, torch.ones(2, 4), generate=count)  # type: ignore[arg-type]
