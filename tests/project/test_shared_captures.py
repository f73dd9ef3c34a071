"""Captures that tests share: given again where the model is the same but for its numbers, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.capture.capture import skeleton
from autotp.capture.rank0 import pack, unpack
from autotp.cost.solver import solve as solver
from autotp.driver import compile as pipeline
from autotp.driver import schedule
from autotp.inputs import Inputs
from tests.helpers.modules.stacked import Stack
from tests.helpers.sharing import capture_files, shared_captures, shared_solutions
from tests.helpers.sharing.shared_captures import model_key, sharing_captures

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Dropping(nn.Module):
    """Attention that drops weights, which a pass notes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training": lambda m: m.layers[1].eval(),
    "dtype": lambda m: m.layers[1].bfloat16(),
    "frozen": lambda m: m.layers[1].requires_grad_(False),
    "a flag": lambda m: setattr(m, "way", "none"),
    "a number": lambda m: setattr(m.layers[1].norm, "eps", 1e-3),
    "a forward": lambda m: setattr(m.layers[1], "forward", lambda x: 2 * x),
    "tied": lambda m: setattr(m.layers[1], "up", m.layers[0].up),
    "a module": lambda m: setattr(m.layers[1], "norm", nn.Identity()),
}


def captured(model: Any, x: torch.Tensor = X) -> Any:
    return pipeline.capture_model(model, Inputs(x), torch.device("cpu"))[0]


def test_equal_models_share_a_capture():
    assert sharing_captures()
    one, other = captured(Stack("none")), captured(Stack("none"))
    assert one.graph is other.graph and one is not other and one.leaves[0] is not other.leaves[0]
    assert autotp.verify(Stack("none"), 2, X)


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_captured_by_itself(change):
    model = Stack("layers")
    CHANGES[change](model)
    assert captured(model, X).graph is not captured(Stack("layers")).graph
    assert model_key(skeleton(Stack("layers"), "cpu")) == model_key(skeleton(Stack("layers"), "cpu"))


def test_what_was_not_compared_with_the_model_is_not_given_to_who_wants_that():
    model, inputs = Stack("sequential"), Inputs(X)
    found = [pipeline.capture_model(model, inputs, torch.device("cpu"), check)[0] for check in (False, None, False)]
    assert [math.isnan(each.error) for each in found] == [True, False, True]
    assert found[0].graph is not found[1].graph and found[1].graph is found[2].graph


def test_what_is_patched_counts(monkeypatch):
    first = captured(Stack("none")).graph
    monkeypatch.setattr(schedule, "CANONICAL", schedule.CANONICAL[:1])
    assert captured(Stack("none")).graph is not first
    monkeypatch.undo()
    assert captured(Stack("none")).graph is first


def test_what_passes_note_is_given_again_and_what_helped_the_exporter_is_not(monkeypatch):
    dropped = [captured(Dropping(), X.view(1, 8, 16)) for _ in range(2)]
    assert dropped[0].graph is dropped[1].graph and "drop weights" in dropped[1].notes[0]
    other = unpack(pack(dropped[0]), torch.device("cpu"))  # as another process has it
    assert other.digest() == dropped[0].digest() and other.notes == dropped[0].notes
    own = pipeline.capture

    def helped(*args: Any) -> Any:
        program = own(*args)
        program.notes.append("masks are ones")
        return program

    monkeypatch.setattr(pipeline, "capture", helped)
    assert captured(Stack("none")).graph is not captured(Stack("none")).graph


def test_inputs_and_hooks_count():
    first = captured(Stack("none")).graph
    assert captured(Stack("none"), X[:4]).graph is not first
    assert captured(Stack("none"), X.clone().requires_grad_()).graph is not first
    assert captured(Stack("none"), X + 1).graph is first
    hooked = Stack("none")
    hooked.layers[0].register_forward_hook(lambda *_: None)
    assert captured(hooked).graph is not captured(hooked).graph


def test_processes_share_by_files(monkeypatch, tmp_path):
    """Whoever asks as another process would, with nothing in memory, gets an equal capture and not the same one."""
    monkeypatch.setenv(capture_files.FOLDER, str(tmp_path))
    monkeypatch.setattr(capture_files, "WORTH", 0.0)
    monkeypatch.setattr(shared_solutions, "WORTH", math.inf)
    monkeypatch.setattr(shared_captures, "KEPT", {})
    model = Stack("none")
    plans, found = [], []
    for _ in range(2):
        shared_captures.KEPT.clear()
        plans.append(autotp.plan(model, 2, example_inputs=X).to_json())
        found += [*shared_captures.KEPT.values()]
    assert plans[0] == plans[1] and found[0].graph is not found[1].graph
    assert found[0].digest() == found[1].digest() and found[0].error == found[1].error == 0
    assert autotp.verify(model, 2, X)
    files = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock")
    shared_captures.KEPT.clear()
    captured(model.eval())  # another
    assert len(files) == 1 and len(list(tmp_path.iterdir())) == 4

    class Local(Stack):
        pass

    shared_captures.KEPT.clear()
    assert captured(Local("none")).graph is not found[0].graph and len(list(tmp_path.iterdir())) == 4


def test_equal_programs_are_solved_once_and_others_by_themselves(monkeypatch, tmp_path):
    solutions = {}
    monkeypatch.setenv(capture_files.FOLDER, str(tmp_path))
    monkeypatch.setattr(shared_solutions, "WORTH", 0.0)
    monkeypatch.setattr(shared_solutions, "SOLUTIONS", solutions)
    model = Stack("none")

    def plan(tp: int = 2, **options: Any) -> str:
        return autotp.plan(model, tp, example_inputs=X, **options).to_json()

    first = plan()
    assert plan() == first and len(solutions) == 1
    others: list[dict[str, Any]] = [{"tp": 4}, {"cluster": "a100-pcie"}, {"memory": 1e9}, {"band": 0.5}]
    for count, options in enumerate(others, 2):
        assert plan(**options) and len(solutions) == count, options
    monkeypatch.setattr(solver, "TIE", 1e-6)
    solved = list(solutions)
    assert plan(tp=3) and list(solutions) == solved, "what a test changes in the solver is not shared"


def test_processes_share_solutions_by_files(monkeypatch, tmp_path):
    monkeypatch.setenv(capture_files.FOLDER, str(tmp_path))
    monkeypatch.setattr(shared_solutions, "WORTH", 0.0)
    monkeypatch.setattr(shared_solutions, "SOLUTIONS", {})
    first = autotp.plan(Stack("none"), 2, example_inputs=X).to_json()
    (solution,) = shared_solutions.SOLUTIONS.values()
    for _ in range(2):  # the second one is another's
        shared_solutions.SOLUTIONS.clear()
        assert autotp.plan(Stack("none"), 2, example_inputs=X).to_json() == first
    (other,) = shared_solutions.SOLUTIONS.values()
    assert other == solution and other is not solution
