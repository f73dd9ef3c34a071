"""The self-check of models that are too large for it: a small one of the same classes stands in for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.capture import selfcheck, small_model, stand_in
from autotp.capture.small_model import cuts, differs, narrowed
from autotp.capture.stand_in import StandIn, trial_of
from autotp.driver.compile import _small, capture_model
from autotp.errors import CaptureError
from autotp.inputs import Inputs

DEPTH, WIDTH, CPU = 4, 32, torch.device("cpu")
IDS = torch.randint(11, (4, 20), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int, wrong: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + (y * random.random() if self.wrong else y)


class Deep(nn.Module):
    """A stack of equal blocks; a wrong one draws numbers that the capture does not see."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, wrong: bool = False) -> None:
        super().__init__()
        self.width, self.depth, self.wrong = width, depth, wrong
        self.table = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, wrong) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(width))
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Tensor, more: Tensor | float = 0.0) -> Tensor:
        x = self.table(ids) + more
        for block in self.blocks:
            x = block(x)
        self.seen.add_(x.detach().mean((0, 1)))  # type: ignore[operator]
        return self.head(x) * ids.shape[1]


def empty(wrong: bool = False, **sizes: int) -> Deep:
    with torch.device("meta"):
        return Deep(wrong=wrong, **sizes)


@pytest.fixture(params=["cut", "narrow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every model is too large; in one way also with few blocks."""
    monkeypatch.setattr(stand_in, "MAX_REAL_NUMBERS", 0)
    if request.param == "narrow":
        monkeypatch.setattr(small_model, "NARROW_WIDTH", 16)
        monkeypatch.setattr(small_model, "MIN_WIDTH", 8)
        monkeypatch.setattr(stand_in, "MAX_STAND_IN_NUMBERS", 6000)  # with two blocks of full width it has 8900 numbers
    yield request.param


def told(model: nn.Module, check: bool | None = None) -> str:
    return " ".join(autotp.plan(model, 2, example_inputs=IDS, check_capture=check).notes)


def test_a_stand_in_is_compared_where_weights_are_on_the_meta_device(way):
    model = empty()
    notes = told(model)
    assert "not compared" not in notes and "2 of the 4 blocks of blocks" in notes
    assert ("layers 4 times narrower" in notes) == (way == "narrow")
    assert len(model.blocks) == DEPTH and all(p.is_meta for p in model.parameters())
    assert "compared" not in told(Deep())  # of one whose weights are there
    more = {"ids": IDS, "more": torch.randn(4, 20, WIDTH)}  # an input as wide as the layers
    assert ("4 times narrower" in str(autotp.plan(model, 2, example_inputs=more).notes)) == (way == "narrow")


def test_a_wrong_capture_is_found_by_the_stand_in(way):
    with pytest.raises(CaptureError, match=r"self-check: the captured graph is not the model: .* \(on a stand-in"):
        told(empty(wrong=True))
    assert "was not compared with the model: check_capture=False" in told(empty(wrong=True), check=False)


def test_a_comparison_ends_after_its_seconds_and_says_so(way, monkeypatch):
    assert "not compared" not in told(empty())  # the control
    monkeypatch.setattr(stand_in, "MAX_SECONDS", 0.0)
    assert "not compared with the model: it would take over 0 CPU seconds on a stand-in" in told(empty(wrong=True))
    assert "check_capture=True compares all the same" in told(empty())
    with pytest.raises(CaptureError, match="self-check"):
        told(empty(wrong=True), check=True)


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("operators", [1, 12])  # at the first, and amid the model, or its program
def test_whatever_call_of_a_comparison_is_too_long_is_the_last(way, monkeypatch, calls, operators):
    begun: list[float] = []

    class Some(selfcheck._AtMost):
        def __init__(self, seconds: float) -> None:
            super().__init__(seconds)
            self.count = operators
            begun.append(seconds)

        def __torch_dispatch__(self, *args: Any) -> Any:
            self.count -= len(begun) >= calls
            self.deadline = self.deadline if self.count else -1.0
            return super().__torch_dispatch__(*args)

    monkeypatch.setattr(selfcheck, "_AtMost", Some)
    assert "not compared with the model: it would take over 20 CPU seconds" in told(empty()) and len(begun) >= calls


def test_large_weights_have_a_stand_in_too(monkeypatch):
    size = selfcheck.bytes_of(Deep())
    for module in (selfcheck, stand_in):
        monkeypatch.setattr(module, "MAX_WEIGHT_BYTES", size)
    model: Any = Deep()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    assert "a stand-in with 2 of the 4 blocks of blocks, and its own weights" in told(model)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    with pytest.raises(CaptureError, match="on a stand-in"):
        told(Deep(wrong=True))
    assert "compared" not in told(model, check=True)  # the model itself is
    model = uneven(model)
    monkeypatch.setattr(small_model, "MIN_WIDTH", 128)
    assert "compared" not in told(model)  # the model itself, as there is memory for it
    with pytest.raises(CaptureError, match="self-check: the captured graph is not the model"):
        told(uneven(Deep(wrong=True)))
    monkeypatch.setattr(stand_in, "free_memory", lambda device: stand_in.WEIGHT_COPIES * size - 1)
    assert "0.0 GB, 1 GB or more; check_capture=True compares all the same; no small model of its classes" in told(
        model
    )


def uneven(model: Any) -> Any:
    """The same with unlike blocks, of which no smaller model is made."""
    for i, block in enumerate(model.blocks):
        block.norm.eps = 1e-5 * (i + 1)
    return model


def mutate_eps(graph: torch.fx.Graph) -> None:
    norm = [n for n in graph.nodes if "layer_norm" in str(n.target)][3]
    norm.args = (*norm.args[:4], 1e-2)


def mutate_operator(graph: torch.fx.Graph) -> None:
    [n for n in graph.nodes if "relu" in str(n.target)][3].target = torch.ops.aten.sigmoid.default


def mutate_weight(graph: torch.fx.Graph) -> None:
    """A block reads another block's weight."""
    first, *_, last = [n for n in graph.nodes if "linear" in str(n.target) and "up" in str(n.args[1])]
    last.args = (last.args[0], first.args[1], last.args[2])


def mutate_wiring(graph: torch.fx.Graph) -> None:
    """A block reads what the one before the last gave."""
    *_, one, two, _ = [n for n in graph.nodes if "layer_norm" in str(n.target)]
    two.args = (one.args[0], *two.args[1:])


@pytest.mark.parametrize("mutate", [mutate_eps, mutate_operator, mutate_weight, mutate_wiring])
def test_a_capture_that_is_not_that_of_the_stand_in_is_noticed(way, mutate):
    model = empty()
    trial = trial_of(model, Inputs(IDS), CPU, None, _small)
    captured, _ = capture_model(model, Inputs(IDS), CPU, check=False)
    assert isinstance(trial, StandIn) and trial.whole is not None and trial.compare(captured) < 1e-6
    mutate(captured.graph)
    with pytest.raises(CaptureError, match="self-check"):  # by the model itself, whose weights are few enough
        trial.compare(captured)
    trial.whole.skip = "too large"
    assert trial.compare(captured) != trial.compare(captured)  # nan
    assert "is captured as another graph: n" in trial.skip


def test_which_blocks_are_kept():
    model: Any = Deep(depth=9)
    assert cuts(model) == {"blocks": 2} and cuts(Deep(depth=3)) == {}
    for i in (2, 5, 8):
        model.blocks[i].norm.eps = 1e-3  # every third is of another kind, the last too
    assert cuts(model) == {"blocks": 6}
    model.blocks[8].norm.eps = 1e-4  # there is only one of this kind
    assert cuts(model) == {}


def test_a_narrow_model_is_of_the_same_modules_and_flags(monkeypatch):
    monkeypatch.setattr(small_model, "NARROW_WIDTH", 16)
    monkeypatch.setattr(small_model, "MIN_WIDTH", 8)
    model: Any = empty().eval()
    model.head.train()
    model.blocks[1].up.weight.requires_grad_(False)
    made: Any
    made, widths = next(narrowed(model.bfloat16()))
    assert widths == {32: 8, 64: 16}
    assert made.head.training and not made.training and not made.blocks[1].up.weight.requires_grad
    assert made.blocks[0].up.weight.shape == (16, 8) and made.blocks[0].up.weight.dtype == torch.bfloat16
    model.blocks[1].up = nn.Identity()  # as where a library has changed modules
    assert not list(narrowed(model))


def test_the_shapes_of_llama_405b_have_a_stand_in(monkeypatch):
    """With a vocabulary as long as that, two tables of 256 columns are too large."""
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    small = next(stand_in._smaller(model))
    assert small.ratio == 128 and stand_in._count(small.model) < stand_in.MAX_STAND_IN_NUMBERS
    monkeypatch.setattr(small_model, "RATIOS", small_model.RATIOS[1:])
    assert not list(stand_in._smaller(model))


def test_a_stand_in_has_two_examples_and_sixteen_positions():
    short = next(stand_in.shortened(Inputs(torch.zeros(8, 4096), torch.zeros(1, 3)), {}))
    assert [list(x.shape) for x in short.args] == [[2, 16], [1, 3]]


def test_a_graph_is_the_same_as_itself():
    captured, _ = capture_model(Deep(), Inputs(IDS), CPU, check=False)
    shallow, _ = capture_model(Deep(depth=2), Inputs(IDS), CPU, check=False)
    assert differs(captured, shallow, {"blocks": 2}) == "" and differs(captured, captured, {}) == ""
    assert "from" in differs(captured, shallow, {})
