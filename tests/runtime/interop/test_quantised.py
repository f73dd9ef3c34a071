"""Models that torchao quantised are sharded as they stand: the parts of a weight split together, in whole groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.capture.copies import plain_weights
from autotp.capture.request import CaptureRequest
from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.errors import CaptureError, StateError
from autotp.inputs import Inputs, normalise
from autotp.ir.layouts import Partition, Shard
from autotp.proof.equality import compare
from autotp.proof.report import Report
from autotp.proof.run import Values
from tests.helpers.modules.quantised import quantised, share, torchao

KINDS = [
    "int8",
    "int8 groups",
    "int8 dynamic",
    "int4 groups",
    "int4 dynamic",
    "float8",
    "float8 rowwise",
    "float8 tensorwise",
]
SHAPE = {
    "vocab_size": 64, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 1, "num_attention_heads": 12,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """Every token goes through all experts, weighed by a router, which nobody quantises."""

    def __init__(self, width: int = 96, inner: int = 192) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, width) / 10)
        self.experts = nn.ModuleList(Mlp(width, inner) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = F.linear(x, self.router).softmax(-1)
        return x + sum(gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def named(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    if name == "mixture":
        return quantised(Mixture()), normalise(torch.randn(2, 3, 96))
    torchao()  # skips where it is not installed
    import transformers  # noqa: PLC0415  most of these tests do without

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    return quantised(model), normalise({"input_ids": torch.randint(64, (2, 4)), "use_cache": False})


def proofs(model: nn.Module, inputs: Inputs, *tps: int) -> list[Report]:
    """What `autotp.verify` says for each of these degrees, from one capture."""
    model = plain_weights(model)
    captured, notes = capture_model(model, inputs, torch.device("cpu"), True, CaptureRequest())
    found = []
    for tp in tps:
        options = Options.read(tp, Steering(objective="prefill"))
        plan = solve_plan(captured, notes, options, "model")
        planned, sharded = apply_plan(captured, plan, options)
        found.append(replace(compare(planned, sharded, Values.of(planned.program, model, inputs)), plan=plan))
    return found


@pytest.mark.parametrize("name", ["llama", "mixture"])
def test_a_quantised_model_is_split_and_computes_the_same(name):
    model, inputs = named(name)
    assert share(model) >= 0.8
    for tp, report in zip((2, 3, 4), proofs(model, inputs, 2, 3, 4), strict=True):
        assert report and report.output_error < 1e-9, report
        plan: Any = report.plan
        whole, held = (sum(each) for each in zip(*(_sizes(p) for p in plan.parameters), strict=True))
        assert held <= 1.03 * whole / tp


def test_stacked_experts_of_transformers_are_split_with_their_scales():
    kinds = torchao("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    import transformers  # noqa: PLC0415  most of these tests do without

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    small = {**SHAPE, **heads, "hidden_size": 64, "intermediate_size": 256, "num_local_experts": 4}
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small)).bfloat16().eval()
    model.set_experts_implementation("grouped_mm")
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        made = kinds.Float8Tensor.from_hp(getattr(experts, name).detach(), granularity=torchao().PerRow())
        setattr(experts, name, nn.Parameter(made, requires_grad=False))
    model = quantised(model, "float8").requires_grad_(False)
    assert share(model) >= 0.8
    inputs = normalise({"input_ids": torch.randint(64, (2, 4)), "use_cache": False})
    for report in proofs(model, inputs, 2, 4):
        assert report and report.output_error < 1e-9, report
        layouts: Any = {p.name.rpartition(".")[2]: p.layout for p in report.plan.parameters}  # type: ignore[union-attr]
        assert all(layouts[f"_{n}_qdata"].dim == layouts[f"_{n}_scale"].dim for n in ("gate_up_proj", "down_proj"))


@pytest.mark.parametrize("kind", ["int8 dynamic", "float8 tensorwise"])
def test_a_whole_model_whose_activations_are_quantised_as_they_come(kind):
    torchao()  # skips where it is not installed
    import transformers  # noqa: PLC0415  most of these tests do without

    torch.manual_seed(0)
    small = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = quantised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), kind)
    (report,) = proofs(model, normalise({"input_ids": torch.randint(64, (2, 4)), "use_cache": False}), 2)
    assert report and report.output_error < 1e-9, report


def _sizes(parameter: Any) -> tuple[int, int]:
    size = getattr(torch, parameter.dtype.removeprefix("torch.")).itemsize
    return size * math.prod(parameter.shape), size * math.prod(parameter.local)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_weight_split_together(kind):
    torch.manual_seed(0)
    model, inputs = quantised(Mlp(32, 64), kind), normalise(torch.randn(2, 3, 32))
    two, three = proofs(model, inputs, 2, 3)
    assert two and three and max(two.output_error, three.output_error) < 1e-9, (two, three)
    placed = {p.name: p.layout for p in two.plan.parameters}  # type: ignore[union-attr]
    data, scale = (placed[f"down._weight_{part}"] for part in ("qdata", "scale"))
    assert isinstance(data, Shard) and isinstance(placed["up._weight_qdata"], Shard)
    if data.dim == 1 and "groups" in kind:  # 2 of 4 groups of 16
        assert isinstance(scale, Shard) and scale.dim == 1


def test_a_scale_that_is_split_in_another_way_is_caught():
    torch.manual_seed(0)
    model, inputs = plain_weights(quantised(Mlp(32, 64), "int8 groups")), normalise(torch.randn(2, 3, 32))
    captured, notes = capture_model(model, inputs, torch.device("cpu"), True, CaptureRequest())
    options = Options.read(2, Steering())
    plan = solve_plan(captured, notes, options, "model")
    planned, sharded = apply_plan(captured, plan, options)
    values = Values.of(planned.program, model, inputs)
    assert compare(planned, sharded, values)
    (leaf,) = (n for n in sharded.graph.nodes if n.op == "placeholder" and "up__weight_scale" in n.name)
    sharded.layouts[leaf] = Shard(1, Partition.plain(2, 2))
    assert not compare(planned, sharded, values)


def held(rank: int, world: int, group: Any, folder: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = quantised(Mlp(32, 64), kind), torch.randn(2, 3, 32)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=x)
    part = sharded.up._weight_qdata.to_local()
    found, state = sharded(x), sharded.full_state_dict()
    sharded.save_checkpoint(folder)
    sharded.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    zeros = float(sharded(x).detach().abs().max())
    sharded.load_state_dict(model.state_dict())
    own = torch.equal(sharded(x), found)
    sharded.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    sharded.load_checkpoint(folder)
    return {
        "difference": float((found - model(x)).detach().abs().max()),
        "zeros": zeros,
        "loaded": own and torch.equal(sharded(x), found),
        "part": (tuple(part.shape), part.dtype),
        "state": {n: (tuple(t.shape), t.dtype) for n, t in state.items()},
    }


def read(rank: int, world: int, group: Any, folder: str, kind: str) -> tuple[float, float]:
    """How far a module on these ranks is from the one that was saved, before it is loaded and after."""
    torch.manual_seed(0)
    model, x = quantised(Mlp(32, 64), kind), torch.randn(2, 3, 32)
    wanted = model(x).detach()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded: Any = autotp.compile(quantised(Mlp(32, 64), kind), mesh=mesh, example_inputs=x)
    before = sharded(x).detach()
    sharded.load_checkpoint(folder)
    return float((before - wanted).abs().max()), float((sharded(x).detach() - wanted).abs().max())


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["int8", "float8 rowwise"])
def test_a_rank_holds_its_part_of_the_numbers_and_saves_and_loads_them(pool, tmp_path, kind):
    torchao()
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    for found in pool.run(held, str(tmp_path / "saved"), kind, world=2):
        assert found["difference"] < 1e-5 and found["loaded"], found
        assert not found["zeros"] > 0  # in float8 a scale of 0 is divided by
        assert found["part"] == ((32, 32), dtype)
        assert found["state"]["down._weight_qdata"] == ((32, 64), dtype)
    for before, after in pool.run(read, str(tmp_path / "saved"), kind, world=4):
        assert after < 1e-5 < 0.01 < before


def test_a_weight_that_is_read_or_set_on_the_sharded_module_names_its_parts():
    model: Any = quantised(Mlp(32, 64))
    sharded: Any = autotp.compile(model, 1, example_inputs=torch.randn(2, 3, 32))
    with pytest.raises(AttributeError, match="weight of up is quantised.*: _weight_qdata, _weight_scale"):
        sharded.up.weight  # noqa: B018  reading is what is tried
    with pytest.raises(StateError, match="weight of up is quantised.*_weight_qdata"):
        sharded.up.weight = model.up.weight
    assert not hasattr(sharded.up, "weight") and sharded.up._weight_qdata.dtype == torch.int8


def test_a_trained_subclass_is_refused_by_its_name():
    model = quantised(Mlp(32, 64))
    model.up.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match="up.weight is a Int8Tensor"):
        autotp.plan(model, 2, example_inputs=torch.randn(2, 3, 32))


class Grouped(nn.Module):
    """Integers in a buffer, with a scale for each group of 48 in a row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, out: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-8, 8, (out, 96)).to(torch.int8))
        self.register_buffer("scale", torch.rand(out, 2))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.weight.to(x.dtype).unflatten(1, (-1, 48)) * self.scale[..., None]
        return F.linear(x, groups.flatten(1))


def test_a_weight_of_few_groups_is_split_along_its_rows():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Grouped(96), nn.SiLU(), Grouped(96)).eval(), normalise(torch.randn(2, 96))
    two, four = proofs(model, inputs, 2, 4)
    assert two and four and max(two.output_error, four.output_error) < 1e-9, (two, four)
    tables: Any = four.plan.tables  # type: ignore[union-attr]
    assert {name: layout.dim for name, layout in tables.items()} == dict.fromkeys(tables, 0) and len(tables) == 4


class Flat(nn.Module):
    """Two numbers of 4 bits in a byte, one row after another, with a scale for each 16 of them in that order."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.shape = out, width
        self.weight = nn.Parameter(torch.randint(256, (out * width // 2, 1)).to(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(out * width // 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.cat([self.weight & 15, self.weight >> 4], 1).reshape(-1, 16).to(x.dtype) - 8
        return F.linear(x, (numbers * self.scale[:, None]).reshape(self.shape))


def test_numbers_of_four_bits_that_are_stored_flat_are_split_by_rows():
    torch.manual_seed(0)
    model = nn.Sequential(Flat(32, 64), nn.SiLU(), Flat(64, 32)).eval()
    for report in proofs(model, normalise(torch.randn(2, 32)), 2, 4):
        assert report and report.output_error < 1e-9, report
        layouts = {p.name: p.layout for p in report.plan.parameters}  # type: ignore[union-attr]
        assert all(isinstance(layout, Shard) and layout.dim == 0 for layout in layouts.values()), layouts


def test_the_fp8_layers_of_transformers_are_split_in_whole_blocks(monkeypatch):
    import transformers.integrations.finegrained_fp8 as fp8  # noqa: PLC0415  most of these tests do without

    def linear(x: Tensor, weight: Tensor, scale: Tensor, size: Any, bias: Any, *_: Any) -> Tensor:
        return F.linear(x, fp8._dequantize_fp8_weight(weight, scale, size, x.dtype), bias)  # the kernel's, in torch

    monkeypatch.setattr(fp8, "_apply_if_grad", lambda function, direct, *args: direct(*args))
    monkeypatch.setattr(fp8, "fp8_linear", linear)
    torch.manual_seed(0)
    size = (128, 128)
    layers = [fp8.FP8Linear(256, 384, block_size=size), fp8.FP8Linear(384, 256, block_size=size)]
    for layer in layers:
        layer.requires_grad_(False)
        layer.weight.data = torch.randn(layer.weight.shape).to(torch.float8_e4m3fn)
        layer.weight_scale_inv.data = torch.rand(layer.weight_scale_inv.shape) / 10
    model = nn.Sequential(layers[0], nn.SiLU(), layers[1]).eval()
    for report in proofs(model, normalise(torch.randn(2, 256)), 2, 3):
        assert report and report.output_error < 1e-9, report
        layouts: Any = {p.name: p.layout for p in report.plan.parameters}  # type: ignore[union-attr]
        assert all(layouts[f"{i}.weight"].dim == layouts[f"{i}.weight_scale_inv"].dim for i in (0, 2)), layouts
