"""A step with a cache runs as one function, compiled or not, and by parts where it must."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, StaticCache

import autotp
from autotp import compat
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.lower.regional import Watch
from autotp.runtime.part import Part
from autotp.runtime.tree import unless_touched
from tests.helpers.models import transformer

LAYERS, PROMPT = 2, 6
IDS = torch.randint(1, 60, (2, PROMPT + 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


class Noting:
    """A backend that notes the blocks of what it compiles, and of what runs; it refuses those that it shall not see."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse, self.compiled, self.calls = refuse, [], []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        blocks = sum("invoke_subgraph" in str(node.target) for node in gm.graph.nodes)
        if blocks and self.refuse:
            raise NotImplementedError("no blocks here")
        self.compiled.append(blocks)

        def run(*args: Any) -> Any:
            self.calls.append(blocks)
            return gm.forward(*args)

        return run


def compiled(backend: Any) -> tuple[Any, Any]:
    """A Llama, and it on one rank."""
    model: Any = transformer("llama", num_hidden_layers=LAYERS).double()
    return model, autotp.compile(model, 1, example_inputs={"input_ids": IDS[:, :PROMPT]}, backend=backend)


@cache
def eager() -> tuple[Any, Any]:
    """The same without a compiler; who changes it puts back what was there."""
    return compiled("eager")


def decoding(pair: tuple[Any, Any], static: bool) -> tuple[Any, Any, Callable[[int], Tensor]]:
    """A Llama on one rank, its cache after a prompt, and a step: the difference to the forward of all tokens."""
    model, sharded = pair
    length = IDS.shape[1]
    cache: Any = StaticCache(model.config, max_cache_len=length) if static else DynamicCache(config=model.config)
    sharded(input_ids=IDS[:, :PROMPT], past_key_values=cache, use_cache=True)
    whole = model(IDS, use_cache=False).logits

    def step(at: int) -> Tensor:
        found = sharded(
            input_ids=IDS[:, at : at + 1], position_ids=torch.tensor([[at]]), past_key_values=cache, use_cache=True
        )
        return (found.logits[:, 0] - whole[:, at]).abs().max()

    return sharded, cache, step


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_step_is_one_function_whose_equal_blocks_are_compiled_once(static):
    backend = Noting()
    sharded, cache, step = decoding(compiled(backend), static)
    assert step(PROMPT) < 1e-12
    backend.calls.clear()
    written = cache.layers[1].keys
    version = written._version
    assert step(PROMPT + 1) < 1e-12 and step(PROMPT + 2) < 1e-12
    assert backend.calls == [LAYERS, LAYERS]
    assert (cache.layers[1].keys is written) == static
    assert (written._version > version) == static  # a backward that needs what was there says so
    assert "without gradients one function" in sharded.plan.report()
    count = len(backend.compiled)
    cache.layers[-1].keys[..., 0, :] += 1.0
    assert step(PROMPT + 3) > 1e-3 and len(backend.compiled) == count  # the cache of every block is read


@torch.no_grad()
def test_what_hooks_a_block_sees_it():
    backend = Noting()
    sharded, _, step = decoding(compiled(backend), static=False)
    seen: list[int] = []
    handle = sharded.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert step(PROMPT) < 1e-12 and seen == [1] and LAYERS not in backend.calls
    handle.remove()
    assert step(PROMPT + 1) < 1e-12 and backend.calls[-1] == LAYERS and seen == [1]


def test_what_has_gradients_or_lacks_a_weight_goes_by_parts():
    x, one = torch.ones(1), unless_touched(lambda *_: "one", Watch(()), lambda *_: "parts")
    assert one(x) == "parts"
    with torch.no_grad():
        assert one(x) == "one" and one(x, torch.ones(1, requires_grad=True)) == "parts"
        assert unless_touched(lambda *_: None, Watch(()), lambda *_: "parts")(x) == "parts"


def test_one_function_runs_below_autograd_and_parts_do_not():
    def excluded(*_: Tensor) -> bool:
        return torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.AutogradFunctionality)

    run = unless_touched(excluded, Watch(()), excluded)
    assert not run(torch.ones(1))
    with torch.no_grad():
        assert run(torch.ones(1)) and not run(torch.ones(1, requires_grad=True))


@torch.no_grad()
def test_a_backend_that_takes_no_blocks_compiles_by_parts(caplog):
    backend = Noting(refuse=True)
    _, _, step = decoding(compiled(backend), static=False)
    with caplog.at_level(logging.WARNING, "autotp"):
        assert step(PROMPT) < 1e-12
        assert step(PROMPT + 1) < 1e-12
    (message,) = [record.message for record in caplog.records if record.name == "autotp"]
    assert "by parts" in message and "no blocks here" in message and set(backend.calls) == {0}


@torch.no_grad()
def test_an_eager_step_calls_no_module_unless_somebody_looks():
    sharded, _, step = decoding(eager(), static=False)
    block, seen = sharded.model.layers[1], []
    assert step(PROMPT) < 1e-12

    def calls(at: int) -> int:
        with patch.object(Part, "forward", autospec=True, side_effect=Part.forward) as forward:
            assert step(at) < 1e-12
        return forward.call_count

    assert calls(PROMPT + 1) == 0
    handle = block.mlp.register_forward_hook(lambda *_: seen.append(block))
    assert calls(PROMPT + 2) > LAYERS and seen == [block]
    handle.remove()
    every = register_module_forward_hook(lambda module, *_: seen.append(module))
    assert calls(PROMPT + 3) > LAYERS and seen.count(block) == 2
    every.remove()
    block._forward_hooks[0] = lambda *_: seen.append(block)  # past the method
    assert calls(PROMPT + 4) > LAYERS and seen.count(block) == 3
    block._forward_hooks.clear()


@torch.no_grad()
def test_a_parameter_in_anothers_place_is_read_at_the_next_step():
    sharded, _, step = decoding(eager(), static=False)
    norm = sharded.model.norm
    assert step(PROMPT) < 1e-12 and step(PROMPT + 1) < 1e-12
    before, norm._parameters["weight"] = norm.weight, nn.Parameter(norm.weight + 1)
    assert step(PROMPT + 2) > 1e-3
    norm.weight = before
    assert step(PROMPT + 3) < 1e-12


@pytest.mark.parametrize("backend, own, wanted", [
    ("inductor", None, False), ("inductor", {"size_asserts": True}, True), ("aot_eager", None, None),
])  # fmt: skip
def test_inductor_leaves_out_its_asserts_in_a_whole_program_alone(backend, own, wanted):
    with patch.object(compat, "compile_whole") as compiled:
        compiler: Any = Lowering(backend, own).compiler()
        for whole in (True, False):
            compiler.compile(lambda: None, whole)
    (_, _, of_whole), (_, _, of_part) = [call.args for call in compiled.call_args_list]
    assert (of_whole or {}).get("size_asserts") == wanted and of_part == own
