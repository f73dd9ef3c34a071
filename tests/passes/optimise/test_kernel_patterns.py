"""Kernels in a rank's program: where patterns put them and where not, and that nothing but rounding changes."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.ir import layouts
from autotp.ir.graph import short_name
from autotp.ir.marks import inherit, write
from autotp.ir.op import aten
from autotp.ir.program import MeshPlace
from autotp.passes.optimise import expressions, kernels
from autotp.passes.optimise.judged import Rewrite
from autotp.passes.optimise.optimisation import RankProgram, Setting
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn, transformer

ON, OFF = {"kernels": True}, {"kernels": False}
CLOSE = 1e-5  # of float32
MINE = ("add_norm", "bias_gelu", "norm")


def put_in(sharded: Any) -> dict[str, int]:
    """How many kernels of each kind are in the program, those of this file."""
    names = (short_name(n.target) for n in sharded._programs_made[-1].graph.nodes if n.op == "call_function")
    found = Counter(n.removeprefix("autotp.") for n in names if n.startswith("autotp."))
    return {k: n for k, n in sorted(found.items()) if k in MINE}


def program(model: nn.Module, inputs: Any, tp: int = 2, **options: Any) -> Any:
    """One rank's program, in one process."""
    return autotp.compile(model, tp, example_inputs=inputs, optimise=ON, **options)


# ---- where they are --------------------------------------------------------------------------------------------------

EXPECTED = {
    "llama": {"add_norm": 2, "norm": 3},
    "gpt2": {"add_norm": 2, "bias_gelu": 2, "norm": 3},
    "bert": {"add_norm": 4, "bias_gelu": 3, "norm": 2},
    "phi3": {"add_norm": 2, "norm": 3},
    "qwen3": {"add_norm": 2, "norm": 7},
    "gpt_neox": {"bias_gelu": 2, "norm": 5},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_found_in(name):
    model = transformer(name)
    sharded = program(model, inputs_of(model))
    assert put_in(sharded) == EXPECTED[name]
    told = next(line for line in sharded.plan.fired if line.startswith("kernels: "))
    assert all(f"{kind} {n} times" in told for kind, n in EXPECTED[name].items())
    assert told in sharded.plan.report()


PLAIN = "nowhere: without Triton on a CUDA device they are plain PyTorch (optimise={'kernels': True})"


def test_off_unless_asked_for():
    model = transformer("llama")
    for switches, why in ((None, PLAIN), (OFF, "switched off")):
        sharded: Any = autotp.compile(model, 2, example_inputs=inputs_of(model), optimise=switches)
        assert not put_in(sharded) and f"kernels: {why}" in sharded.plan.report()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_on_a_device_only_where_somebody_measures_them(backend):
    def idle(device: str, judges: Any) -> str:
        given: Any = (MeshPlace(0, 2, ""), None, None, torch.device(device), backend)
        setting = Setting(*given, judges=judges)
        return kernels.Kernels().idle(RankProgram(torch.fx.Graph(), setting))

    assert idle("cpu", {}) == idle("cpu", {"kernels": None}) == PLAIN
    assert idle("cuda", {}) == "nowhere: not measured (optimise={'kernels': True})"
    assert idle("cuda", {"kernels": None}) == ""


class Dropped(nn.Module):
    """Draws by counters, both ways."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)


def test_what_draws_by_counters_runs_by_its_kernel_only_where_asked():
    counts = []
    for switches in (None, ON):
        torch.manual_seed(3)
        sharded: Any = autotp.compile(Dropped(), 1, example_inputs=torch.ones(4, 6), optimise=switches)
        names = [short_name(n.target) for n in sharded._programs_made[-1].graph.nodes if n.op == "call_function"]
        counts.append(sum(n.endswith("_fused") for n in names))
        counts.append(sharded(torch.ones(4, 6)))
    assert counts[0] == 0 and counts[2] == 1 and torch.equal(counts[1], counts[3])
    ours = ("counter_dropout", "counter_uniform", "class_sums", "class_sums_backward")
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"autotp::{name}", "CUDA") for name in ours)


# ---- where they are not ----------------------------------------------------------------------------------------------


class RMS(nn.Module):
    """Written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Net(nn.Module):
    """A norm between two linear layers; `way` is what else happens."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.up, self.norm, self.down, self.way = nn.Linear(16, 16), RMS(), nn.Linear(16, 16), way

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        if self.way == "sum":
            h = h + x
        y = self.norm(h)
        if self.way == "read":
            y = y + h.pow(2).mean(-1, keepdim=True)
        return self.down(y) + (h if self.way == "sum" else 0)


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("pin", "wanted"), [(Replicate(), {"norm": 1}), (Shard(1), {})])
def test_statistics_of_a_split_row_stay_sums_over_ranks(pin, wanted):
    sharded = program(redrawn(Net()), X, pins={"up:output": pin, "norm:output": pin})
    assert put_in(sharded) == wanted
    square = next((line for line in sharded.graph.splitlines() if "aten.pow" in line), "")
    assert ("S(1)" in square) == (not wanted)


def test_a_value_that_is_read_in_the_middle_stays():
    assert put_in(program(redrawn(Net("sum")), X, tp=1)) == {"add_norm": 1}
    assert put_in(program(redrawn(Net("read")), X, tp=1)) == {"norm": 1}  # the mean is computed twice there

    class Read(RMS):
        def forward(self, x: Tensor) -> Any:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * (x * scale) + scale

    net = Net()
    net.norm = Read()
    assert put_in(program(redrawn(net), X, tp=1)) == {}


class Pair(nn.Module):
    """A sum made by one module and normalised by another."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.first, self.norm, self.apart = Added() if apart else nn.Identity(), nn.LayerNorm(16), apart

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) if self.apart else x.sin() + x
        return self.norm(h) + h


class Added(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + x


@pytest.mark.parametrize(("apart", "wanted"), [(False, {"add_norm": 1}), (True, {"norm": 1})])
def test_a_sum_stays_in_the_module_that_makes_it(apart, wanted):
    assert put_in(program(redrawn(Pair(apart)), X, tp=1)) == wanted


class Region(nn.Module):
    """A product and GeLU, one of them or both in a checkpointed region."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.up, self.both = nn.Linear(16, 16), both

    def forward(self, x: Tensor) -> Any:
        if self.both:
            return checkpoint(lambda y: nn.functional.gelu(self.up(y)), x, use_reentrant=False)
        return nn.functional.gelu(checkpoint(self.up, x, use_reentrant=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(("both", "wanted"), [(True, {"bias_gelu": 1}), (False, {})])
def test_a_region_keeps_what_is_in_it(both, wanted):
    model, x = redrawn(Region(both)), X.clone().requires_grad_()
    sharded = program(model, x, tp=1)
    assert put_in(sharded) == wanted
    assert difference(sharded(x), model(x)) < CLOSE
    for module in (sharded, model):
        module(x).sum().backward()
    assert gradients_differ(sharded, model) < CLOSE


def expression(layout: layouts.Layout, dtype: torch.dtype = torch.float32) -> tuple[fx.Graph, fx.Node]:
    """A layer norm of a value that lies so."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta, weight.meta = {"val": torch.empty(3, 8, dtype=dtype)}, {"val": torch.empty(8, dtype=dtype)}
    write(x, layout=layout)
    write(weight, layout=layouts.R)
    node = graph.call_function(aten.layer_norm.default, (x, [8], weight))
    inherit(node, x)
    graph.output(node)
    return graph, node


ROWS = layouts.Partition.plain(8, 2)


@pytest.mark.parametrize(
    ("layout", "dtype", "found"),
    [
        (layouts.R, torch.float32, True),
        (layouts.Shard(0, layouts.Partition.plain(3, 2)), torch.bfloat16, True),
        (layouts.Shard(1, ROWS), torch.float32, False),
        (layouts.P, torch.float32, False),
        (layouts.Grouped(0, layouts.Groups(0, ROWS)), torch.float32, False),
        (layouts.R, torch.float64, False),
    ],
)
def test_only_whole_rows_that_may_be_read(layout, dtype, found):
    graph, node = expression(layout, dtype)
    rewrite = kernels.norm(node)
    assert (rewrite is not None and rewrite.put(*rewrite.arguments) is not None) == found
    graph.lint()


def test_rows_that_no_program_holds_stay():
    _, node = expression(layouts.R)
    assert kernels.norm(node) is not None
    with patch.object(kernels, "MAX_COLUMNS", 7):
        assert kernels.norm(node) is None


def test_products_in_either_order():
    graph = fx.Graph()
    x, y, size = (graph.placeholder(name) for name in ("x", "y", "size"))
    x.meta["val"] = y.meta["val"] = X
    sigmoid = graph.call_function(aten.sigmoid.default, (x,))
    silu = expressions.Call(aten.mul, (expressions.Name("x"), expressions.Call(aten.sigmoid, (expressions.Name("x"),))))
    for args, found in (((x, sigmoid), True), ((sigmoid, x), True), ((y, sigmoid), False), ((sigmoid, 2.0), False)):
        node = graph.call_function(aten.mul.Tensor, args)
        assert (expressions.find(silu, node) is not None) == found
        graph.erase_node(node)
    scaled = graph.call_function(aten.mul.Tensor, (x, size))
    assert expressions.find(expressions.Call(aten.mul, (expressions.Name("x"), expressions.Name("y"))), scaled) is None


# ---- that nothing but rounding changes -------------------------------------------------------------------------------


def written_wrong(node: fx.Node) -> Rewrite | None:
    """The pattern of norms with another eps."""
    rewrite = kernels.norm(node)
    if rewrite is None:
        return None
    target, args, *rest = rewrite.arguments
    return rewrite._replace(arguments=(target, (*args[:3], 0.1, args[4]), *rest))


def differences(rank: int, world: int, group: Any, name: str, options: dict, wrong: bool = False) -> tuple[Any, ...]:
    """Outputs' and gradients' from the unsharded model, and which kernels were in."""
    model: Any = transformer(name)
    inputs = inputs_of(model)
    table = (("norm", written_wrong),) if wrong else kernels.PATTERNS
    with patch.object(kernels, "PATTERNS", table):
        sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), **options)
    found, wanted = sharded(**inputs).logits, model(**inputs).logits
    for out in (found, wanted):
        out.square().mean().backward()
    return difference(found, wanted), gradients_differ(sharded, model), put_in(sharded)


@pytest.mark.parametrize("sequence", [None, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert"])
def test_two_ranks_give_what_the_model_gives(pool, name, sequence):
    options = {"optimise": sequence or ON, "sequence_parallel": sequence}  # True: with all other optimisations
    for out, gradient, found in pool.run(differences, name, options, world=2):
        assert out < CLOSE and gradient < CLOSE, (out, gradient)
        assert len(found) > 1


def test_without_kernels_and_with_a_wrong_one(pool):
    for out, gradient, found in pool.run(differences, "llama", {"optimise": OFF}, world=2):
        assert out < CLOSE and gradient < CLOSE and not found
    for out, gradient, found in pool.run(differences, "llama", {"optimise": ON}, True, world=2):
        assert out > 100 * CLOSE and gradient > 100 * CLOSE and found == {"norm": 5}


def test_modules_are_called_as_before():
    """Blocks' hooks see the same values, and a checkpointed block computes the same again."""
    logs: list[list[Tensor]] = []
    for switches in (OFF, ON):
        model: Any = transformer("gpt2-short").train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that another name for it will come
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = inputs_of(model)
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs, optimise=switches)
        log: list[Tensor] = []
        logs.append(log)
        for layer in sharded.transformer.h:
            layer.register_forward_pre_hook(lambda _, args, log=log: log.append(args[0].detach()))
            layer.register_forward_hook(lambda *a, log=log: log.append(a[2].detach()))
            layer.register_full_backward_hook(lambda _, to, of, log=log: log.append(of[0]))
        loss = sharded(**inputs).logits.square().mean()
        loss.backward()
        log += [g for _, g in sorted(sharded.full_grad_dict().items())]
    assert len(logs[0]) == len(logs[1]) > 8
    assert max(difference(a, b) for a, b in zip(*logs, strict=True)) < CLOSE


def test_half_precision_is_no_worse():
    """Held against the model in float64: what rounds once is closer to it than what rounds after every operator."""
    exact: Any = transformer("llama-short").double()
    inputs = inputs_of(exact)
    wanted = exact(**inputs).logits.detach()
    model: Any = transformer("llama-short").bfloat16()
    errors = []
    for switches in (OFF, ON):
        found = autotp.compile(model, 1, example_inputs=inputs, optimise=switches)(**inputs).logits.detach()
        errors.append(float((found.double() - wanted).square().mean().sqrt()))
    assert errors[1] < 1.05 * errors[0], errors


# As in tests/runtime/lower/test_compiled.py: torch itself reads the attribute.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_they_stay_in():
    """By `torch.compile`, whole: the same numbers as eager, by the same kernels."""
    model: Any = transformer("phi3")
    inputs = inputs_of(model)
    found = []
    for backend in ("eager", "aot_eager"):
        sharded: Any = autotp.compile(model, 1, example_inputs=inputs, backend=backend, optimise=ON)
        out = sharded(**inputs).logits
        out.square().mean().backward()
        found.append((out, sharded.full_grad_dict()))
        assert put_in(sharded) == EXPECTED["phi3"]
    (out, grads), (wanted, wanted_grads) = found
    assert torch.equal(out, wanted) and all(torch.equal(g, wanted_grads[n]) for n, g in grads.items())
