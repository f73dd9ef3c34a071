"""Capture: what it tries where plain export refuses, the self-check, the errors, and in-place operators."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._logging import structured

import autotp
from autotp.capture import assumptions
from autotp.driver.compile import capture_model
from autotp.errors import CaptureError
from autotp.inputs import Inputs
from tests.helpers.cases.capture_cases import IDS, MORE, WIDTH, Decides, Experts, Masked, Net, X, same


def notes_of(model: nn.Module, inputs: Any) -> str:
    return str(autotp.plan(model, 2, example_inputs=inputs).notes)


def refusal(model: nn.Module, inputs: Any, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        autotp.plan(model, 2, example_inputs=inputs, **options)
    return str(caught.value)


# ---- masks of ones ---------------------------------------------------------------------------------------------------


class Padded(Masked):
    """Its own mask is not of ones: it hides the word 0."""

    def own(self, ids: Tensor) -> Tensor:
        return (ids != 0).long()


def test_a_mask_that_export_needs_is_of_ones_in_every_call():
    model = Masked()
    assert "masks of ones for attention_mask" in notes_of(model, IDS)
    same(model, IDS, IDS, MORE)  # another size, and no mask there either
    assert autotp.verify(model, 2, IDS)
    told = {"input_ids": IDS, "attention_mask": (IDS > 3).long()}
    assert notes_of(model, told) == "()"
    sharded: Any = autotp.compile(model, 1, example_inputs=IDS)
    assert torch.equal(sharded(**told), model(**told))  # a mask that is given is used


def test_masks_of_ones_are_refused_where_the_model_takes_others():
    assert not (IDS == 0).any()  # so that the example alone does not show it
    told = refusal(Padded(), IDS)
    assert "with masks of ones in place of none the model computes something else" in told
    assert "Pass that argument explicitly in example_inputs" in told and "attention_mask[..., None]" in told


def test_which_masks_are_missing():
    class Towers(nn.Module):
        def forward(
            self, input_ids, decoder_input_ids, pixel_values, attention_mask=None, decoder_attention_mask=None,
            global_attention_mask=None, head_mask=None, pixel_mask=None, mask_length=3, **more,
        ):  # fmt: skip
            raise NotImplementedError

    pixels, signature = torch.ones(2, 3, 8, 6), inspect.signature(Towers().forward)
    found = assumptions._missing(signature, (IDS, MORE, pixels), {"decoder_attention_mask": None})
    assert {n: like for n, (like, _) in found.items()} == {
        "attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids", "pixel_mask": "pixel_values",
    }  # fmt: skip
    full = assumptions._with_ones(signature, found, (IDS, MORE, pixels), {})
    given = signature.bind(*full.args, **full.kwargs).arguments
    assert [tuple(given[n].shape) for n in found] == [(2, 6), (3, 9), (2, 8, 6)]
    assert not assumptions._missing(signature, (IDS, MORE, pixels, MORE, MORE), {"pixel_mask": MORE})


# ---- experts ---------------------------------------------------------------------------------------------------------


class Counting(Experts):
    """What it adds for an expert that is hit does not depend on the tokens: no loop over all experts is the same."""

    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out = x @ self.experts.sum(0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            out = out + scores.mean() * (1 + int(expert.item()))
        return out


def test_another_implementation_of_the_experts_is_tried_on_the_skeleton_alone():
    model = Experts("eager")
    assert "the experts implementation 'batched_mm' in place of 'eager'" in notes_of(model, X)
    assert model.config._experts_implementation == "eager"
    report = autotp.verify(model, 2, X)
    assert report and 0 < report.capture_error < 1e-5  # other operators, the same numbers but for rounding


def test_a_loop_over_the_experts_that_are_hit_runs_over_all():
    model = Experts()
    assert "running over all indices" in notes_of(model, X)
    assert autotp.verify(model, 2, X)
    sharded: Any = autotp.compile(model, 1, example_inputs=X)
    for x in (X, X[:1], torch.randn(9, WIDTH)):  # one token has two experts, so one expert has none
        torch.testing.assert_close(sharded(x), model(x))


def test_a_loop_that_must_not_run_over_all_is_refused():
    told = refusal(Counting(), X)
    assert "with loops over all indices, not only those that are hit, the model computes something else" in told
    assert "for expert in (mask.sum((-1, -2)) > 0).nonzero()" in told and "The loop runs as often as" in told


def test_a_loop_that_cannot_do_without_any_token_is_refused():
    class Averaging(Experts):
        def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
            out = self.up(x)
            for expert in (mask.sum((-1, -2)) > 0).nonzero():
                _, token = torch.where(mask[int(expert.item())])
                if token.numel() == 0:
                    continue
                out = out + x[token].mean(0)  # of nothing: not a number
            return out

    assert "self-check: the captured graph is not the model" in refusal(Averaging(), X)


def test_a_loop_that_leaves_nothing_out_proves_nothing():
    class Whole(Counting):
        def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
            return super().looped(x, scores, torch.ones_like(mask))

    assert "it could not be shown that a loop may run over all indices" in refusal(Whole(), X)


# ---- branches on values ----------------------------------------------------------------------------------------------


def test_a_branch_on_values_of_the_inputs_is_a_condition_of_every_call():
    model = Decides()
    assert "draft_export" in notes_of(model, IDS)
    padded = MORE.clone()
    padded[:, 5:] = 0
    sharded = same(model, IDS, IDS, MORE, padded, MORE, padded)
    programs = [p.capture for p in sharded._programs_made]
    assert len(programs) == 2  # one for each way, whatever the sizes
    conditions = [c.conditions for c in programs]
    assert (
        all(len(c.texts) == 1 for c in conditions if c is not None) and None not in conditions
    )  # none for the constant
    assert "needs" in str(programs[0].accepts([padded])) and programs[0].accepts([MORE]) is None
    assert autotp.verify(model, 2, IDS) and autotp.verify(model, 2, padded)


@pytest.mark.parametrize("what", ["weights", "random numbers", "buffers"])
def test_a_branch_on_anything_else_is_refused(what):
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            seen = {"weights": y.sum() + x.sum(), "random numbers": torch.rand(()) - x.sum(), "buffers": self.steps}[
                what
            ]
            return -y if seen > 0 else y

    told = refusal(Other(), X)
    assert "return -y if seen > 0 else y" in told and "A Python branch depends on the value of a tensor" in told


def test_a_draft_does_not_compute_with_weights(monkeypatch):
    """Their memory would be allocated, and what is in it would decide. Nor is a stack read for its report."""
    known: dict[str, bool] = {}
    stacks: list[int] = []
    monkeypatch.setattr(structured, "get_framework_stack", lambda frames=0, cpp=False: stacks.append(frames) or [])

    class Casting(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).half().float()  # torch's own leaves memory in a cast that nothing was written to
            z = torch.zeros_like(x)
            z[0] = y[0] * (2 * x.shape[0] - x.shape[0])
            values = {"input": x + 1, "weight": self.up.weight, "cast": y, "overwritten": z, "view": z.view(-1)}
            known.update({n: getattr(v, "real_tensor", None) is not None for n, v in values.items()})
            return y if x.sum() < 100 else -y

    found, _ = capture_model(Casting(), Inputs(X), torch.device("cpu"), check=False)
    assert found.conditions is not None
    assert known == {"input": True, "weight": False, "cast": False, "overwritten": False, "view": False}
    assert 3 not in stacks  # frames: so many at each operation on a size


# ---- fixed sizes -----------------------------------------------------------------------------------------------------


class Stubborn(Net):
    """Wants its sizes as plain numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x.shape[0], int):
            raise TypeError("a size is no int")
        return self.up(x)


def test_fixed_sizes_are_the_last_resort():
    assert "one batch size and length only" in notes_of(Stubborn(), X)
    sharded = same(Stubborn(), X, X, X[:2], X)
    assert len(sharded._programs_made) == 2
    assert notes_of(nn.Linear(WIDTH, WIDTH), X) == "()"  # nothing is changed for a plain model


def test_what_changes_nothing_for_a_model_is_not_tried():
    class Stubborner(Net):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                raise TypeError("not while compiling")
            return self.up(x)

    told = refusal(Stubborner(), X)
    assert told.count("Tried with") == 1 and "Tried with fixed sizes: the same" in told


@pytest.mark.parametrize("wanted", [True, False])
def test_example_inputs_may_be_on_the_meta_device(wanted):
    plan = autotp.plan(nn.Linear(8, 8), 2, example_inputs=torch.randn(4, 8, device="meta", requires_grad=wanted))
    here = autotp.plan(nn.Linear(8, 8), 2, example_inputs=torch.randn(4, 8, requires_grad=wanted))
    assert plan.placements == here.placements and plan.digest == here.digest
    assert "the capture was compared with the model on random inputs, for there are none" in "".join(plan.notes)
