"""The self-check holds a capture against the model itself; the errors of capture say where and what to do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.capture import selfcheck, stand_in
from autotp.capture.capture_errors import WAYS_OUT
from autotp.capture.selfcheck import Trial
from autotp.driver.compile import capture_model
from autotp.errors import CaptureError, InputError
from autotp.inputs import Inputs
from tests.helpers.cases.selfcheck_cases import WIDTH, Counter, Net

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
SWITCH = {"on": 1.0}


@torch.library.custom_op("autotp_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Does not say the shape of its result, nor its derivative."""
    return x * 2


@torch.library.custom_op("autotp_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Has no derivative."""
    return x * 2


twice.register_fake(torch.empty_like)


class Drawn(Net):
    def forward(self, x: Tensor) -> Any:
        return {"y": self.up(x), "z": [self.up(x) * random.random()]}


class Global(Net):
    """Scales the gradient alone, by a number that is another one after the capture."""

    def forward(self, x: Tensor) -> Any:
        y, scale = self.up(x), SWITCH["on"]
        SWITCH["on"] *= 2
        return y * scale + (y * (1 - scale)).detach()


class Told(Net):
    """Gives back a number that is no tensor."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.up(x), self.calls


class Remembers(Net):
    """Writes a number of its own to a buffer."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.steps.fill_(self.calls)
        return self.up(x)


class Gives(Net):
    """Gives back the buffer that it wrote to, itself."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.steps


def capture_of(model: nn.Module, check: bool | None = None, inputs: Any = X) -> Any:
    return capture_model(model, inputs if isinstance(inputs, Inputs) else Inputs(inputs), torch.device("cpu"), check)


@pytest.mark.parametrize("training", [False, True])
def test_a_right_capture_passes_and_nothing_is_disturbed(training):
    model = Net().train(training)
    model.up.weight.grad = torch.ones(WIDTH, WIDTH)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    captured, notes = capture_of(model)
    assert captured.error == 0.0 and "compared" not in str(notes)
    assert torch.equal(torch.rand(2), wanted[0]) and random.random() == wanted[1]
    assert torch.equal(model.up.weight.grad, torch.ones(WIDTH, WIDTH)) and model.up.bias.grad is None
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and model.calls == 0


def test_a_buffer_that_is_given_back_is_compared_as_the_call_left_it():
    assert capture_of(Gives())[0].error == 0.0


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Counter, "0"),
        (Drawn, "output ['z'][0]"),
        (Global, "the gradient of up."),
        (Told, "output [1]"),
        (Remembers, "buffer steps"),
    ],
)
def test_a_wrong_capture_is_caught_and_named(model, what):
    with pytest.raises(CaptureError) as caught:
        autotp.plan(model(), 2, example_inputs=X)
    told = str(caught.value)
    assert "self-check: the captured graph is not the model" in told and what in told and "is off by" in told
    assert "a counter, Python's random" in told and "check_capture=False" in told
    with pytest.raises(CaptureError, match="self-check"):
        autotp.compile(model(), 1, example_inputs=X)
    with pytest.raises(CaptureError, match="self-check"):
        autotp.verify(model(), 2, X)
    notes = autotp.plan(model(), 2, example_inputs=X, check_capture=False).notes
    assert "the capture was not compared with the model: check_capture=False" in notes


def test_a_wrong_graph_is_caught():
    """The negative control of the comparison itself: one number of a right graph is changed."""
    model = Net().eval()
    captured, _ = capture_of(model)
    trial = Trial.of(model, Inputs(X), torch.device("cpu"))
    assert trial.compare(captured) == 0.0
    norm = next(n for n in captured.graph.nodes if "batch_norm" in str(n.target))
    norm.args = tuple(a + 1e-2 if isinstance(a, float) else a for a in norm.args)
    with pytest.raises(CaptureError, match=r"is off by [0-9.e-]+ of its largest value, and rounding allows 1.2e-04"):
        trial.compare(captured)


def test_where_nothing_is_compared_the_notes_say_so(monkeypatch):
    for wrong in ("yes", 1):
        with pytest.raises(InputError, match="check_capture"):
            autotp.plan(Net(), 2, example_inputs=X, check_capture=wrong)  # type: ignore[arg-type]
    model, size = Counter(), sum(t.nbytes for t in [*Counter().parameters(), *Counter().buffers()])
    for module in (selfcheck, stand_in):
        monkeypatch.setattr(module, "MAX_WEIGHT_BYTES", size)  # the limit itself is not under it
    monkeypatch.setattr(stand_in, "free_memory", lambda device: 0)
    notes = autotp.plan(model, 2, example_inputs=X).notes
    assert "0.0 GB, 1 GB or more; check_capture=True" in str(notes)
    with pytest.raises(CaptureError, match="self-check"):
        autotp.plan(model, 2, example_inputs=X, check_capture=True)
    for module in (selfcheck, stand_in):
        monkeypatch.setattr(module, "MAX_WEIGHT_BYTES", size + 1)
    with pytest.raises(CaptureError, match="self-check"):
        autotp.plan(model, 2, example_inputs=X)


def test_a_model_that_fails_itself_is_told_from_a_capture_that_fails():
    ids = torch.tensor([[1, 99]])  # tracing sees no values
    notes = autotp.plan(nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)), 2, example_inputs=ids).notes
    assert "the model itself fails on the example inputs: IndexError" in str(notes)
    with pytest.raises(CaptureError, match="It is not the capture: the model itself fails on the example inputs"):
        autotp.plan(nn.Linear(WIDTH, WIDTH), 2, example_inputs=torch.ones(4, 3))


def test_a_model_without_a_backward_is_compared_forward():
    class Forward(Net):
        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return twice(self.up(x)) * (self.calls if self.training else 1)

    captured, notes = capture_of(Forward().eval())
    assert captured.error == 0.0 and "the model's own backward fails" in str(notes)
    with pytest.raises(CaptureError, match="output 0 is off by"):
        capture_of(Forward())


def test_lower_precision_and_autocast():
    for model, inputs in ((Net().bfloat16(), X.bfloat16()), (Net(), X)):
        with torch.autocast("cpu", torch.bfloat16, enabled=inputs is X):
            assert capture_of(model.eval(), inputs=inputs)[0].error < 0.1


def test_gradients_of_inputs_are_compared():
    class Cut(Net):
        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.up(x.detach()) + x * (self.calls > 1) - x.detach() * (self.calls > 1)

    with pytest.raises(CaptureError, match="the gradient of"):
        capture_of(Cut(), inputs=X.clone().requires_grad_())


# ---- errors ----------------------------------------------------------------------------------------------------------


class Branch(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        if y.sum() > 0:
            y = -y
        return y


class Number(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return y[: int(y.sum().item())]


class Loop(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        for row in y[y[:, 0] > 0]:
            y = y + row
        return y


class Aligned(Net):
    def forward(self, x: Tensor) -> Any:
        lengths, scores = torch.tensor([4]), self.up(x).log_softmax(-1)[:, None]
        return nn.functional.ctc_loss(scores, torch.tensor([[1, 2]]), lengths, lengths // 2)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        rows = nn.utils.rnn.pack_padded_sequence(x[:, None], torch.tensor([len(X)]))
        return self.rnn(rows)[0].data


class Foreign(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.from_numpy(np.tanh(self.up(x).detach().numpy()))


class Writer(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return self.up(x)


class Opaque(Net):
    def forward(self, x: Tensor) -> Any:
        return opaque(self.up(x))


@pytest.mark.parametrize(
    ("model", "line", "way_out"),
    [
        (Branch, "if y.sum() > 0:", "torch.where (both sides are computed), or pass"),
        (Number, "return y[: int(y.sum().item())]", "pass the number as an argument"),
        (Loop, "for row in y[y[:, 0] > 0]:", "Let it run over all indices"),
        (Aligned, "nn.functional.ctc_loss(scores", "take the loss of them outside"),
        (Packed, "return self.rnn(rows)[0].data", "Run the layer on the padded rows"),
        (Foreign, "torch.from_numpy(np.tanh(", "leaves torch for another library"),
        (Writer, "self.up.weight.clamp_(-0.1, 0.1)", "A parameter is changed by the optimizer alone"),
        (Opaque, "return opaque(self.up(x))", "torch.library.register_fake"),
    ],
)
def test_every_kind_of_error_names_the_line_and_the_way_out(model, line, way_out, capfd):
    with pytest.raises(CaptureError) as caught:
        autotp.plan(model(), 2, example_inputs=X)
    told = str(caught.value)
    assert told.startswith(f"{model.__name__} cannot be captured as one graph: ")
    assert line in told and "test_selfcheck.py:" in told and way_out in told
    assert capfd.readouterr().err == ""  # torch prints the whole graph there


def test_the_last_way_out_fits_everything():
    assert WAYS_OUT[-1][0] == "" and len({advice for _, advice in WAYS_OUT}) == len(WAYS_OUT)
