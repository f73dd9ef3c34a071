"""The self-check where weights, names or a copy of the model are not to be had for the asking."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.capture.selfcheck import Trial
from autotp.errors import CaptureError
from autotp.inputs import Inputs
from tests.helpers.cases.selfcheck_cases import WIDTH, Counter, Net

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Output(OrderedDict[str, Any]):
    """A model's output whose type is registered without names, as those of diffusers are."""


pytree.register_pytree_node(
    Output,
    lambda held: (list(held.values()), list(held)),
    lambda values, names: Output(zip(names, values, strict=True)),
    serialized_type_name="tests.Output",
)


class Held(Net):
    """Its output has no named leaves; a counter makes its capture wrong in training."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return {
            "x": x * 2,
            "out": Output(sample=self.up(x), more=(self.norm(x) + (self.calls if self.training else 1),)),
        }


class Reads(Net):
    """Reads a buffer that has no values on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.arange(WIDTH) * 1.0)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.up(x)) * self.signs


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_outputs_without_names_are_compared():
    assert "compared" not in str(autotp.plan(Held().eval(), 2, example_inputs=X).notes)
    with pytest.raises(CaptureError, match=r"output \['out'\]\[1\]\[0\] is off by"):
        autotp.plan(Held(), 2, example_inputs=X)


def test_a_model_on_the_meta_device_is_compared():
    for kind in (Net, Reads):
        model = on_meta(kind)
        notes = autotp.plan(model, 2, example_inputs=X).notes
        assert "the capture was compared with the model on random weights, for there are none" in str(notes)
        assert all(p.is_meta for p in model.parameters())
        report = autotp.verify(model, 2, X)
        assert report and report.capture_error == 0.0
    for check in (None, True):
        with pytest.raises(CaptureError, match="self-check: the captured graph is not the model: output 0 is off"):
            autotp.plan(on_meta(Counter), 2, example_inputs=X, check_capture=check)
    with pytest.raises(CaptureError, match="self-check"):
        autotp.verify(on_meta(Counter), 2, X)


def test_verify_is_false_where_the_capture_is_not_compared():
    class Fails(Net):
        def forward(self, x: Tensor) -> Any:
            if not torch.compiler.is_compiling():
                raise RuntimeError("no kernel for this")
            return self.up(x)

    report = autotp.verify(Fails(), 2, X)
    assert not report and report.difference is None and "nan" not in str(report)
    assert "not proved" in str(report) and "RuntimeError: no kernel for this" in str(report)
    assert report.unproved == "the model itself fails on the example inputs: RuntimeError: no kernel for this"


def test_a_weight_that_a_hook_computes_is_copied():
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    model(X)  # from here on the weight is no leaf, which torch does not copy
    wanted = model(X)
    trial = Trial.of(model, Inputs(X), torch.device("cpu"))
    assert torch.equal(trial.outputs(Inputs(X))["0"], wanted) and trial.original is not None


# ---- no false alarms -------------------------------------------------------------------------------------------------


def test_a_buffer_is_compared_on_the_scale_of_what_is_written_to_it():
    """What arrives at the second norm has a mean of zero, so its running mean is made of rounding errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
    report = autotp.verify(model, 2, torch.randn(4, 8, 3, 3))
    assert report and report.inside is None, report


class Tied(nn.Module):
    """Every row sums to one: rounding says which of them is the largest, and no result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(self.up(x)).softmax(-1)
        return rows / rows.sum(-1).max()


def test_a_difference_that_reaches_no_result_is_told_and_no_fault(captured_once):
    model = Tied()
    reports = [autotp.verify(model, tp, torch.randn(16, 16, 8)) for tp in (2, 4, 4)]
    assert all(reports) and all(r.gradient_error < 1e-12 for r in reports)
    told = [r for r in reports if r.inside is not None]
    assert told and told[0].inside is not None and told[0].inside.direction == "backward"
    assert "differs inside, which reaches no result: (backward) at" in str(told[0])
