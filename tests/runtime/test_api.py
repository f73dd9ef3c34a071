"""The public functions: what they take, what they refuse, and how ranks that differ hear of it."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from transformers import BatchEncoding

import autotp
from autotp.errors import CaptureError, InputError, PlanError, RankError, StateError
from autotp.runtime.module import LazyModule
from tests.helpers.errors import error_of
from tests.helpers.models import inputs_of, redrawn, transformer

HOME = Path(autotp.__file__).parent


class Net(nn.Module):
    """An MLP whose forward has one required argument and one that may be left out."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, hidden), nn.Linear(hidden, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.drop(torch.relu(self.up(x))))
        return y if mask is None else y * mask


def net(hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return redrawn(Net(hidden)).eval()


class Branching(nn.Module):
    """Cannot be captured: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if y.sum() > 0:  # the line that the error shows
            y = -y
        return y


X, MASK = torch.ones(3, 16), torch.ones(3, 8)
EXAMPLES: dict[str, Any] = {
    "tensor": X,
    "tuple": (X,),
    "mapping": {"x": X, "mask": MASK},
    "BatchEncoding": BatchEncoding({"x": X, "mask": MASK}),
    "Inputs": autotp.Inputs(X, mask=MASK),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_example_inputs_of_every_kind(kind):
    model = net()
    sharded: Any = autotp.compile(model, 1, example_inputs=EXAMPLES[kind])
    assert torch.equal(sharded(X), model(X)) and torch.equal(sharded(X, MASK), model(X, MASK))
    assert autotp.plan(model, 2, example_inputs=EXAMPLES[kind]).placements["up.weight"] != "I"


def test_a_transformers_model_brings_its_own_inputs():
    model = transformer("llama-short")
    sharded: Any = autotp.compile(model, 1)
    inputs = inputs_of(model)
    assert torch.equal(sharded(**inputs).logits, model(**inputs).logits)
    plan = autotp.plan(model, 4)
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    blind = autotp.plan(empty, 4)
    assert replace(blind, notes=()) == replace(plan, notes=())
    assert "was compared with the model on random weights" in str(blind.notes) and "compared" not in str(plan.notes)
    with pytest.raises(InputError, match="needs example_inputs for Net"):
        autotp.plan(net(), 2)


LIES: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda m: m.parameters(),
    "named_parameters": lambda m: m.named_parameters(),
    "buffers": lambda m: m.buffers(),
    "modules": lambda m: m.modules(),
    "children": lambda m: m.children(),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({}),
    "full_state_dict": lambda m: m.full_state_dict(),
    "full_grad_dict": lambda m: m.full_grad_dict(),
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "zero_grad": lambda m: m.zero_grad(),
    "plan": lambda m: m.plan,
    "graph": lambda m: m.graph,
}


def test_without_inputs_a_module_is_captured_at_its_first_call():
    model = net()
    sharded: Any = autotp.compile(model, 1)
    assert issubclass(LazyModule, autotp.ShardedModule) and "first call" in repr(sharded)
    for name, ask in LIES.items():
        with pytest.raises(StateError, match="sharded at its first call"):
            ask(sharded)
            pytest.fail(name)
    with pytest.raises(AttributeError, match="sharded at its first call"):
        _ = sharded.up
    with pytest.raises(InputError, match="forward accepts"):
        sharded(X, masc=MASK)
    calls: list[int] = []
    sharded.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert torch.equal(sharded(X), model(X))
    assert not isinstance(sharded, LazyModule) and calls == [1]
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert repr(sharded) == repr(model)
    sharded(X).sum().backward()
    assert sharded.up.weight.grad is not None and calls == [1, 1]


def test_a_mode_set_before_the_first_call_is_kept():
    model = net()
    sharded: Any = autotp.compile(model, 1, random="torch").train()
    torch.manual_seed(1)
    found = sharded(X)
    torch.manual_seed(1)
    assert torch.equal(found, model.train()(X)) and sharded.drop.training
    model.eval()
    assert torch.equal(sharded.eval()(X), model(X))


def test_one_plain_process_plans_and_says_how_to_launch(monkeypatch):
    script = os.path.relpath(__file__)
    monkeypatch.setattr(sys, "argv", [script])
    model = net()
    sharded: Any = autotp.compile(model, 4, example_inputs=X)
    assert "up.weight" in str(sharded.plan) and "f_star" in str(sharded.graph).replace("*", "_star")
    with pytest.raises(RankError, match=f"torchrun --nproc-per-node 4 {script}"):
        sharded(X)
    with pytest.raises(RankError, match="torchrun --nproc-per-node 4"):
        autotp.parallelize(model, sharded.plan)(X)
    assert not dist.is_initialized()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "zero": ({"tp": 0}, InputError, "at least 1"),
    "negative": ({"tp": -2}, InputError, "at least 1"),
    "bool": ({"tp": True}, InputError, "is bool"),
    "float": ({"tp": 2.0}, InputError, "is float"),
    "text": ({"tp": "2"}, InputError, "is str"),
    "objective": ({"objective": "speed"}, InputError, "objective='speed'"),
    "backend": ({"backend": "tensorrt"}, InputError, "backend='tensorrt'.*'eager'"),
    "options": ({"options": {"fast": 1}}, InputError, "fast"),
    "outputs": ({"outputs": "half"}, InputError, "'full' or 'sharded'"),
    "sequence": ({"sequence_parallel": "yes"}, InputError, "sequence_parallel='yes'"),
    "cluster": ({"cluster": "abacus"}, InputError, "abacus"),
    "mesh": ({"mesh": 4}, InputError, "mesh is int"),
    "plan": ({"plan": "plan.json"}, InputError, "Plan.load"),
    "pins": ({"pins": ["up.weight"]}, InputError, "pins is list"),
    "pin's value": ({"pins": {"up.weight": 0}}, InputError, "Shard"),
    "pin's name": ({"pins": {"upp.weight": Shard(0)}}, InputError, "fits no parameter.*up.weight"),
    "pin's dimension": ({"pins": {"up.weight": Shard(5)}}, PlanError, "up.weight"),
    "no inputs": ({"example_inputs": 3}, InputError, "example_inputs is int"),
    "other inputs": ({"example_inputs": (X, X, X)}, InputError, "forward accepts"),
    "no name": ({"example_inputs": {"y": X}}, InputError, "forward accepts"),
    "no model": ({"model": torch.relu}, InputError, "nn.Module"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what):
    given, kind, text = BAD[what]
    with pytest.raises(kind, match=f"(?s){text}") as caught:
        arguments: Any = {"model": net(), "tp": 2, "example_inputs": X, **given}
        autotp.compile(**arguments)
    assert isinstance(caught.value, autotp.AutoTPError)
    with pytest.raises(TypeError):
        autotp.compile(net(), 2, exmple_inputs=X)  # type: ignore[call-arg]


def test_pins_hold_by_any_name_and_from_the_end():
    model = transformer("llama-tied-short")
    plan = autotp.plan(model, 2, pins={"lm_head.weight": Replicate(), "*.down_proj.weight": Shard(-1)})
    assert str(plan.placements["model.embed_tokens.weight"]) == "I"
    assert {str(v) for n, v in plan.placements.items() if "down_proj" in n} == {"S(1)"}


def test_a_model_that_cannot_be_captured_shows_its_line():
    with pytest.raises(CaptureError) as caught:
        autotp.compile(Branching(), 2, example_inputs=X)
    assert "if y.sum() > 0:" in str(caught.value) and "test_api.py" in str(caught.value)
    lazy: Any = autotp.compile(Branching(), 1)
    for _ in range(2):
        with pytest.raises(CaptureError, match="torch.where"):
            lazy(X)


def test_a_plan_fits_its_model_and_its_ranks():
    model = net()
    plan = autotp.plan(model, 1, example_inputs=X)
    assert torch.equal(autotp.compile(model, plan=plan, example_inputs=X)(X), model(X))
    assert torch.equal(autotp.parallelize(model, plan)(X), model(X))
    with pytest.raises(PlanError, match=r"other parameters.*up.weight"):
        autotp.parallelize(net(64), plan)
    with pytest.raises(PlanError, match="tp=1 ranks, and here are tp=2"):
        autotp.compile(model, 2, plan=plan, example_inputs=X)
    whole: tuple[dict[str, Any], ...] = (
        {"pins": {"up.weight": Shard(0)}},
        {"cluster": "h100"},
        {"sequence_parallel": False},
        {"objective": "x"},
    )
    for more in whole:
        with pytest.raises(InputError, match="plan= is complete"):
            autotp.compile(model, plan=plan, example_inputs=X, **more)


def differing(rank: int, world: int, group: Any) -> dict[str, tuple[str, str, float]]:
    """What ranks hear that were given different things."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    x = torch.ones(3, 16)

    def compiled(model: nn.Module, **options: Any) -> Any:
        return autotp.compile(model, example_inputs=x, mesh=mesh, **options)

    found = {
        "shapes": error_of(lambda: compiled(net(32 + 32 * rank))),
        "graphs": error_of(lambda: compiled(net().train(rank == 0))),
        "weights": error_of(lambda: (torch.manual_seed(rank), compiled(Net(), check=True))),
        "capture": error_of(lambda: compiled(Branching() if rank else net())),
        "inputs": error_of(lambda: autotp.compile(net(), mesh=mesh, example_inputs=(x,) * (1 + 2 * rank))),
        "world": error_of(lambda: compiled(net(), tp=3)),
    }
    plan = autotp.plan(net(), 2, example_inputs=x, pins={"up.weight": Shard(0)} if rank else {"up.weight": Replicate()})
    found["plans"] = error_of(lambda: autotp.parallelize(net(), plan, mesh))
    sharded: Any = compiled(net())
    sharded(x)
    found["input shapes"] = error_of(lambda: sharded(torch.ones(4 + rank, 16)))
    found["input names"] = error_of(lambda: sharded(torch.ones(7, 16), **({"mask": torch.ones(7, 8)} if rank else {})))
    torch.manual_seed(rank)
    found["random"] = error_of(lambda: sharded.train()(x))
    found["sampled values"] = error_of(lambda: sharded.eval()(torch.full((6, 16), float(rank))))
    compiled(net(), check=False)(torch.full((6, 16), float(rank)))  # values are not looked at
    checked = compiled(net(), check=True)
    checked(x)
    found["values"] = error_of(lambda: checked(x + rank))
    found["still"] = error_of(lambda: (checked(x), sharded(x)))
    lazy: Any = autotp.compile(net(), mesh=mesh)
    found["lazy"] = error_of(lambda: lazy(torch.ones(3 + 2 * rank, 16, 16)[rank]))
    return found


def test_ranks_that_were_given_different_things_all_hear_of_it(pool):
    told = pool.run(differing, world=2)
    for one in told:
        assert not any(one.pop(what)[0] for what in ("still", "lazy", "random")), one
    expected = {
        "shapes": "parameter up.weight: rank 0: (32, 16) torch.float32, rank 1: (64, 16)",
        "graphs": "do not agree on the model",
        "weights": "parameter up.weight: rank 0: (32, 16) torch.float32 ",
        "capture": "if y.sum() > 0",
        "inputs": "forward accepts",
        "world": "tp=3, but the mesh has 2 tp ranks",
        "plans": "do not agree on the plan",
        "input shapes": "input 0: rank 0: (4, 16) torch.float32, rank 1: (5, 16)",
        "input names": "do not agree on the inputs of this call",
        "sampled values": "do not agree on the values of the inputs of call 5 of Net",
        "values": "values of input 0",
    }
    for what, text in expected.items():
        for one in told:
            kind, message, seconds = one[what]
            assert kind and text in message, (what, one[what])
            assert seconds < 40, (what, seconds)


# ---- keywords, and the way of a compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "compile", "parallelize", "sweep", "verify", "stages"])
def test_keywords_are_shown_with_their_defaults_and_others_are_refused(name):
    function: Any = getattr(autotp, name)
    parameters = inspect.signature(function).parameters
    assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    shown = {n: p.default for n, p in parameters.items()}
    if name != "parallelize":
        assert (shown["objective"], shown["band"], shown["pins"]) == ("training", 0.02, None)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'sequence_paralel'$"):
        function(net(), 1, sequence_paralel=True)


def test_a_compile_is_followed_to_the_export_in_five_files(monkeypatch):
    files: list[str] = []
    export: Any = torch.export.export

    def listening(*args: Any, **kwargs: Any) -> Any:
        stack = [Path(frame.filename) for frame in traceback.extract_stack()]
        files.extend(str(path.relative_to(HOME)) for path in stack if path.is_relative_to(HOME))
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", listening)
    autotp.compile(net(), 1, example_inputs=torch.ones(5, 16))
    ours = ["api.py", "driver/compile.py", "capture/rank0.py", "capture/capture.py", "capture/export.py"]
    assert list(dict.fromkeys(files)) == ours
