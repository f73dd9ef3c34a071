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
from autotp.capture.subclasses.weights import plain_weights
from autotp.driver.options import CaptureRequest, Options, Steering
from autotp.driver.pipeline import apply_plan, capture_model, solve_plan
from autotp.errors import CaptureError
from autotp.inputs import Inputs, normalise
from autotp.ir.layouts import Partition, Shard
from autotp.proof.compare import compare
from autotp.proof.report import Report
from autotp.proof.simulate import Values
from tests.helpers.quantised import quantised, share

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
    import transformers  # noqa: PLC0415  most of these tests do without

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
    }[name]
    ids = torch.randint(64, (2, 4))
    return quantised(model(config(**SHAPE))), normalise({"input_ids": ids, "use_cache": False})


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


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixture"])
def test_a_quantised_model_is_split_and_computes_the_same(name):
    model, inputs = named(name)
    assert share(model) >= 0.8
    for tp, report in zip((2, 3, 4), proofs(model, inputs, 2, 3, 4), strict=True):
        assert report and report.output_error < 1e-9, report
        plan: Any = report.plan
        whole, held = (sum(each) for each in zip(*(_sizes(p) for p in plan.parameters), strict=True))
        assert held <= 1.03 * whole / tp


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


def held(rank: int, world: int, group: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = quantised(Mlp(32, 64)), torch.randn(2, 3, 32)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    sharded: Any = autotp.compile(model, mesh=mesh, example_inputs=x)
    part = sharded.up._weight_qdata.to_local()
    found, state = sharded(x), sharded.full_state_dict()
    sharded.save_checkpoint(folder)
    sharded.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    zeros = float(sharded(x).detach().abs().max())
    sharded.load_checkpoint(folder)
    return {
        "difference": float((found - model(x)).detach().abs().max()),
        "zeros": zeros,
        "loaded": torch.equal(sharded(x), found),
        "part": (tuple(part.shape), part.dtype),
        "state": {n: (tuple(t.shape), t.dtype) for n, t in state.items()},
    }


@pytest.mark.ranks
def test_a_rank_holds_its_part_of_the_integers_and_saves_and_loads_them(pool, tmp_path):
    quantised(nn.Linear(8, 8))  # skips where torchao is not installed
    for found in pool.run(held, str(tmp_path / "saved"), world=2):
        assert found["difference"] < 1e-5 and found["loaded"] and found["zeros"] == 0, found
        assert found["part"] == ((32, 32), torch.int8)
        assert found["state"]["down._weight_qdata"] == ((32, 64), torch.int8)


def test_a_trained_subclass_is_refused_by_its_name():
    model = quantised(Mlp(32, 64))
    model.up.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match="up.weight is a Int8Tensor"):
        autotp.plan(model, 2, example_inputs=torch.randn(2, 3, 32))
