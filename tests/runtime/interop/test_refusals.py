"""What others may not do with a sharded module is refused in a sentence of its own; what they may, works."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of
from tests.helpers.models import inputs_of, transformer


def refused(rank: int, world: int, group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    ways: dict[str, Callable[[], Any]] = {
        "torch.compile": lambda: torch.compile(sharded, backend="eager")(x),
        "compile": lambda: sharded.compile(),
        "trace": lambda: torch.jit.trace(sharded, x),
        "quantise": lambda: torch.ao.quantization.quantize_dynamic(sharded, {nn.Linear}),
        "DDP": lambda: nn.parallel.DistributedDataParallel(sharded, process_group=group),
        "DDP of a layer": lambda: nn.parallel.DistributedDataParallel(sharded[0]),
        "grad": lambda: torch.func.grad(lambda v: sharded(v).sum())(x),
        "vmap": lambda: torch.func.vmap(sharded)(x),
        "forward mode": lambda: torch.func.linearize(sharded, x),
        "batched": lambda: torch.autograd.grad(sharded(y), y, torch.ones(3, 4, 8), is_grads_batched=True),
        "symbolic_trace": lambda: torch.fx.symbolic_trace(sharded),
    }
    y = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that torch.jit is going
        found: dict[str, Any] = {name: error_of(way)[:2] for name, way in ways.items()}
    with pytest.raises((RuntimeError, NotImplementedError), match="DTensor|sharding strategy"):  # torch's own error
        nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), sharded))
    plain = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)), process_group=group)
    found["plain"] = plain(x).shape == (4, 8)
    found["read"] = len(inspect.getmembers(sharded))
    found["shared"] = sharded.share_memory() is sharded and sharded[0].weight.to_local().is_shared()

    def around(x: Tensor) -> Tensor:
        return sharded(x * 2) + 1

    def product(module: nn.Module) -> Any:
        """The Hessian of a loss times a vector, the way that does not need a transform."""
        return torch.autograd.functional.hvp(lambda v: module(v).square().sum(), x, x)[1]

    found["hvp"] = product(sharded), product(model)
    compiled: Any = torch.compile(around, backend="eager")
    with torch.no_grad():
        found["around"] = float((compiled(x) - (model(x * 2) + 1)).abs().max())
    return found


def test_each_has_a_sentence_of_its_own(pool):
    words = {"torch.compile": "backend='inductor'", "compile": "backend='inductor'", "trace": "torch.jit.trace"}
    for found in pool.run(refused, world=2):
        for name, word in {
            **words,
            "DDP": "DistributedDataParallel averages",
            "DDP of a layer": "DistributedDataParallel averages",
            "quantise": "Quantise the model first",
            "grad": "transforms of torch.func (Grad)",
            "vmap": "transforms of torch.func (Vmap)",
            "forward mode": "(forward-mode differentiation)",
            "batched": "(is_grads_batched)",
            "symbolic_trace": "sharded.program(example_inputs)",
        }.items():
            kind, text = found[name]
            assert kind == "StateError" and word in text, (name, kind, text)
        assert found["plain"] and found["shared"]
        assert found["read"] > 50  # to read all attributes, as a debugger does, is nothing to refuse
        assert found["around"] < 1e-6
        torch.testing.assert_close(*found["hvp"])  # the way out


def test_a_cache_that_is_asked_for_in_a_call_is_given():
    model = transformer("llama", use_cache=True)
    sharded: Any = autotp.compile(model, 1, example_inputs=inputs_of(model))
    assert sharded(**inputs_of(model)).past_key_values is None  # the config's wish is in the plan's notes
    assert sharded(**inputs_of(model), use_cache=True).past_key_values.get_seq_length() == 16
    assert error_of(lambda: sharded(**inputs_of(model), use_cache=False))[0] == ""
