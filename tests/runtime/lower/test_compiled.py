"""`backend=`: the parts of a program compiled whole, equal ones once; numbers, sizes, hooks and regions as without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import InputError
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import TWELVE, inputs_of, redrawn, transformer
from tests.helpers.modules import two_axes
from tests.helpers.modules.stacked import Stack

# Dynamo reads `grad` of what it traces, and hides this warning where warnings are shown (torch 2.13).
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
SIZED = ("llama", "gpt2", "bert")
CLOSE = {"gradients": 1e-4, "no_grad": 1e-5, "inference_mode": 1e-5}  # in float32, as eager programs are held to


def run(module: Any, inputs: dict[str, Tensor]) -> Tensor:
    out = module(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def equal(rank: int, world: int, group: Any, name: str, backend: str, sizes: bool) -> dict[str, float]:
    """How far a step, inference and, where `sizes` is said, inference at another size are from the original's."""
    model: Any = transformer(name)
    inputs = inputs_of(model)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), backend=backend)
    for m in (model, sharded):
        run(m, inputs).square().mean().backward()
    found = {"gradients": gradients_differ(sharded, model)}
    for context, given in ((torch.no_grad, inputs), (torch.inference_mode, inputs_of(model, 3, 12, seed=1)))[
        : 1 + sizes
    ]:
        with context():
            found[context.__name__] = difference(run(sharded, given), run(model, given))
    return found


@pytest.mark.parametrize("name", TWELVE)
def test_what_the_compiler_traces_is_the_model(pool, name):
    for found in pool.run(equal, name, "aot_eager", name in SIZED, world=2):
        assert all(x < CLOSE[kind] for kind, x in found.items()), found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inductor_computes_the_same(pool, name):
    for found in pool.run(equal, name, "inductor", False, world=2):
        assert all(x < CLOSE[kind] for kind, x in found.items()), found


def traced(rank: int, world: int, group: Any) -> list[tuple[int, int]]:
    """Of each compiled part, the collectives and waits in what the compiler sees, forward and backward."""
    seen: list[tuple[int, int]] = []

    def counted(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names = [str(n.target) for n in gm.graph.nodes]
        waits = sum("wait_tensor" in n for n in names)
        seen.append((sum("_c10d_functional" in n for n in names) - waits, waits))
        return make_boxed_func(gm.forward)

    model: Any = transformer("llama")
    inputs = inputs_of(model)
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), backend=backend)
    run(sharded, inputs).sum().backward()
    return seen


def test_the_compiler_sees_functional_collectives(pool):
    for seen in pool.run(traced, world=2):
        sent, waited = (sum(x) for x in zip(*seen, strict=True))
        assert sent == waited >= 10, (
            seen
        )  # f* and f of two layers' attentions and feed-forwards, the embedding, the head


def counting() -> tuple[list[int], Callable[..., Any]]:
    """What was compiled, and a backend that notes it."""
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(len(gm.graph.nodes))
        return gm.forward

    return seen, backend


def compiled(layers: int) -> tuple[Any, Any, list[int]]:
    seen, backend = counting()
    model: Any = transformer("llama", num_hidden_layers=layers)
    return model, autotp.compile(model, 1, example_inputs=inputs_of(model), backend=backend), seen


def test_repeated_blocks_are_compiled_once():
    found = []
    for layers in (2, 4):
        model, sharded, seen = compiled(layers)
        run(sharded, inputs_of(model)).sum().backward()
        found.append(len(seen))
        assert f"parts of the program; equal ones are compiled once: {len(seen)} functions" in sharded.plan.report()
    assert found[0] == found[1] == 4  # before the blocks, a block, the norm after them, the head


def test_sizes_are_compiled_for_a_few_times_at_most():
    model, sharded, seen = compiled(2)
    with torch.no_grad():
        for batch, length in ((2, 16), (2, 24), (3, 16)):
            run(sharded, inputs_of(model, batch, length))
        few = len(seen)
        for batch, length in ((4, 40), (5, 11), (7, 9), (2, 16), (6, 33)):
            inputs = inputs_of(model, batch, length)
            assert torch.equal(run(sharded, inputs), run(model, inputs))
    assert len(seen) == few == 12  # as it is, with one size that varies, with both


def test_what_stands_in_the_place_of_a_module_inside_a_block_is_called():
    model, sharded, seen = compiled(2)
    inputs, heard = inputs_of(model), []
    plain = run(sharded, inputs)
    hook = sharded.model.layers[1].mlp.register_forward_hook(lambda *_: heard.append("mlp"))
    block = sharded.model.layers[0].register_forward_hook(lambda *_: heard.append("block"))
    assert torch.equal(run(sharded, inputs), plain) and heard == ["block", "mlp"]
    hook.remove()
    assert torch.equal(run(sharded, inputs), plain) and heard == ["block", "mlp", "block"]
    block.remove()
    inner = sharded.model.layers[0].self_attn
    sharded.model.layers[0].self_attn = Wrapped(inner, heard)
    assert torch.equal(run(sharded, inputs), plain) and heard[3:] == ["wrapped"]


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, heard: list[str]) -> None:
        super().__init__()
        self.inner, self.heard = inner, heard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.heard.append("wrapped")
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("way", ["layers", "sequential", "closures", "none"])
def test_checkpointed_regions_are_kept(way):
    torch.manual_seed(0)
    model = redrawn(Stack(way)).double()
    x = torch.randn(8, 16).double()
    seen, backend = counting()
    sharded: Any = autotp.compile(model, 1, example_inputs=x, backend=backend)
    calls: list[int] = []
    sharded.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for m in (model, sharded):
        m(x).square().mean().backward()
    assert all(torch.allclose(p.grad, sharded.full_grad_dict()[n]) for n, p in model.named_parameters())  # type: ignore[arg-type]
    assert len(calls) == (1 if way == "none" else 2) and seen


def test_a_copy_is_compiled_for_itself():
    model, sharded, seen = compiled(2)
    inputs = inputs_of(model)
    other = copy.deepcopy(sharded)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
        twice, once = run(other, inputs), run(sharded, inputs)
    assert torch.allclose(twice, 2 * once) and torch.equal(once, run(model, inputs))


def test_a_backend_that_torch_does_not_know_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="choose 'eager', .*'inductor'"):
        autotp.compile(model, 1, example_inputs=torch.ones(2, 4), backend="inducter")
    with pytest.raises(InputError, match="has no options"):
        autotp.compile(model, 1, example_inputs=torch.ones(2, 4), options={"max_autotune": True})


def test_options_are_those_of_the_backend():
    given: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any, *, options: Any = None) -> Callable[..., Any]:
        given.append(options)
        return gm.forward

    x = torch.ones(2, 4)
    sharded = autotp.compile(nn.Linear(4, 4), 1, example_inputs=x, backend=backend, options={"shape_padding": True})
    sharded(x)
    assert given == [{"shape_padding": True}]


def on_two_axes(rank: int, world: int, group: Any, split: bool) -> dict[str, float]:
    """A compiled program on 2 x 2 ranks, whose blocks torch's data parallelism wraps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole = two_axes.model_of("esm")
    inputs = two_axes.slice_of(whole, mesh["dp"].get_local_rank())
    sharded: Any = autotp.compile(model, dp=2, mesh=mesh, fully_shard=split, example_inputs=inputs, backend="aot_eager")
    mine, wanted = run(sharded, inputs), run(model, whole)
    for logits in (mine, wanted):
        logits.square().mean().backward()
    rows = wanted.chunk(2)[mesh["dp"].get_local_rank()]
    return {"outputs": difference(mine, rows.clone()), "gradients": gradients_differ(sharded, model)}


def test_a_compiled_program_runs_on_two_axes(pool):
    for found in pool.run(on_two_axes, True):
        assert max(found.values()) < 1e-10, found


# Vectors that every compiler knows, so that Inductor tries none; two small functions do not pay for compiled headers.
QUICK = {"cpp.vec_isa_ok": True, "cpp.simdlen": 256, "cpp_cache_precompile_headers": False}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by Inductor's own imports
def test_dropout_by_counters_is_the_same_compiled():
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 8))
    x = torch.randn(4, 16)
    plain = autotp.compile(model, 1, example_inputs=x)
    compiled = autotp.compile(model, 1, example_inputs=x, backend="inductor", options=QUICK)
    found = []
    for sharded, seed in ((plain, 1), (compiled, 1), (compiled, 2)):
        sharded.zero_grad()
        torch.manual_seed(seed)
        out = sharded(x)
        out.sum().backward()
        found.append((out, sharded.full_grad_dict()["0.weight"]))
    eager, same, other = found
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(eager, same, strict=True))
    assert not torch.allclose(eager[0], other[0], atol=1e-2)
