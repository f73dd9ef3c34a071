"""Sharded modules on the device: what measuring decides there, and steps that can be recorded as CUDA graphs.

Each runs on the CPU too, so that only the device is new where there is one.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.runtime.lower import lower, measured
from autotp.runtime.part import Part
from autotp.runtime.storage import ShardState
from benchmarks.gpu.decoding import graphed, our_way, ours
from benchmarks.gpu.sizes import TINY
from benchmarks.helpers.llama.megatron import Llama
from tests.helpers.compare import gradients_differ
from tests.helpers.models import inputs_of, transformer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]  # "@pytest.mark.cuda" is how `make gpu` finds this file
ROOT = Path(__file__).parents[3]
CLOSE = 1e-4  # float32, where a device sums in another order


class Reads(TorchDispatchMode):
    """Within this context: operators that bring a value from the device to the host, which no CUDA graph can record."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"):
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """No TF32: it has ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_measured_computes_the_same(device):
    model = transformer("llama", num_hidden_layers=1).to(device)
    inputs = {k: x.to(device) for k, x in inputs_of(model).items()}
    switches: Any = {"kernels": "measured"} if device == "cpu" else None  # the default where there is a device
    with patch.object(lower, "path_of", lambda: None), patch.object(measured, "TIMED_SECONDS", 0.01):
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs, optimise=switches)
    for m in (model, sharded):
        m(**inputs).logits.float().square().mean().backward()
    assert gradients_differ(sharded, model) < CLOSE
    [told] = [line for line in sharded.plan.fired if line.startswith("kernels: ")]
    for name in ("add_norm", "norm"):
        assert name in told
    assert "of torch's speed" in told and "failed" not in told and "differs" not in told, told


@pytest.mark.cuda
def test_what_is_measured_computes_the_same_compiled():
    model = transformer("llama", num_hidden_layers=1).to("cuda")
    inputs = {k: x.to("cuda") for k, x in inputs_of(model).items()}
    with patch.object(lower, "path_of", lambda: None), patch.object(measured, "TIMED_SECONDS", 0.01):
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs, backend="inductor")
    for m in (model, sharded):
        m(**inputs).logits.float().square().mean().backward()
    assert gradients_differ(sharded, model) < CLOSE
    assert any(line.startswith("kernels: ") and "failed" not in line for line in sharded.plan.fired)


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_and_decode_can_be_recorded(device):
    scale = dataclasses.replace(TINY, device=device)
    with torch.device(device), torch.no_grad():
        model = Llama(scale.decoder).to(device).eval()
        ids = torch.randint(scale.decoder.vocabulary, (1, scale.prompt + 1))
        way = our_way(ours(scale, model, ids, 1), ids)
        for step, wanted in zip(way, (model(ids[:, :-1]), model(ids)), strict=True):
            step()
            step()  # the second one finds the cache's tensors, and is another program
            with Reads() as reads:
                step()
            assert reads.calls == []
            torch.testing.assert_close(graphed(step, device)()[:, -1], wanted[:, -1], atol=CLOSE, rtol=CLOSE)


OTHER = """
import torch

import autotp
from tests.helpers.models import inputs_of, transformer
from tests.helpers.other_device import NAME

model = transformer("llama", num_hidden_layers=1)
inputs = inputs_of(model)
moved = autotp.compile(model, 1, example_inputs=inputs)
expected = moved(**inputs).logits
model.to(NAME), moved.to(NAME)
inputs = {name: x.to(NAME) for name, x in inputs.items()}
made = autotp.compile(model, 1, example_inputs=inputs)
for module in (model, made, moved):
    logits = module(**inputs).logits
    logits.square().mean().backward()
    assert {x.device.type for x in (*module.parameters(), *module.buffers(), logits)} == {NAME}
    torch.testing.assert_close(logits.cpu(), expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.cpu(), parameter.grad.cpu())
assert autotp.verify(model, 2, example_inputs=inputs)
try:
    made(input_ids=inputs["input_ids"].cpu())
except RuntimeError as error:  # the control: an operand that is elsewhere is noticed
    print(f"operands are on {NAME}" in str(error))
"""


def test_one_process_computes_where_the_model_is():
    """A model that is there, and one that is sent there later, forward and backward; and its proof."""
    told = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "True\n", told.stderr[-3000:]


def test_programs_of_another_device_are_let_go():
    """Their graphs name it; a conversion of types alone lets none go."""
    sharded: Any = autotp.compile(torch.nn.Linear(4, 4), 1, example_inputs=torch.ones(2, 4))
    before = list(sharded._programs_made)
    assert before and sharded.double()(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
    assert sharded._programs_made[:1] == before
    there = [torch.device("cpu")]

    def moved(x: torch.Tensor) -> torch.Tensor:
        there[0] = torch.device("meta")
        return x.float()

    with patch.object(ShardState, "device", property(lambda _: there[0])):
        sharded._apply(moved)
    assert not sharded._programs_made and not sharded._programs_made.kinds
    assert not any(part._programs for part in sharded._order if isinstance(part, Part))
    assert sharded(torch.ones(2, 4)).shape == (2, 4)


def test_a_read_is_noticed():
    """The negative control."""
    with Reads() as reads:
        torch.ones(2).sum().item()
    assert reads.calls
