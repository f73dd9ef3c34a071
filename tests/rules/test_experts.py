"""Mixtures of experts: split by expert or within each expert, as the cost says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import autotp
from autotp.ir.specs import GroupedSpec
from autotp.plans.plan import Plan
from autotp.proof.run import NARROW
from tests.helpers.models import redrawn

TOKENS = {"input_ids": torch.arange(32).reshape(2, 16)}
BY_EXPERT = {"*.gate_up_proj": Shard(0), "*.experts.down_proj": Shard(0)}


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip


def mixture(implementation: str = "grouped_mm", **changes: int) -> nn.Module:
    sizes: dict[str, Any] = {**SIZES, **changes, "use_cache": False}
    config = Qwen3MoeConfig(**sizes)
    config._experts_implementation = implementation
    return Qwen3MoeForCausalLM(config)


def dims(plan: Plan) -> set[tuple[str, int]]:
    """(last part of the name, split dimension) of the experts' weights."""
    return {(p.name.split(".")[-1], p.layout.dim) for p in plan.parameters if ".experts." in p.name}  # type: ignore


@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("pins", [None, BY_EXPERT], ids=["as priced", "by expert"])
def test_grouped_mm(tp: int, pins: dict | None):
    """Router gradients too: every gradient is compared. Five experts on three ranks: two, two, one."""
    layers = 2 if tp == 2 else 1  # uneven shares of two layers take the solver ten times as long as those of one
    report = autotp.verify(redrawn(mixture(num_hidden_layers=layers)), tp, TOKENS, pins=pins)
    assert report, report
    assert report.plan is not None
    if pins:
        assert dims(report.plan) == {("gate_up_proj", 0), ("down_proj", 0)}
        assert {p.role for p in report.plan.parameters if ".experts." in p.name} == {"expert-parallel"}


@pytest.mark.parametrize("pins", [None, BY_EXPERT], ids=["as priced", "by expert"])
def test_experts_with_biases(pins: dict | None):
    """A bias row is looked up for every token, before it is known where the groups end."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("moe_intermediate_size", "num_experts")}
    sizes["num_hidden_layers"] = 1
    config = GptOssConfig(**sizes, num_local_experts=4, use_cache=False, attn_implementation="eager")  # type: ignore
    report = autotp.verify(redrawn(GptOssForCausalLM(config)), 2, TOKENS, pins=pins)
    assert report, report


def test_batched_mm():
    report = autotp.verify(redrawn(mixture("batched_mm", num_hidden_layers=1)), 2, TOKENS)
    assert report, report
    assert report.plan is not None and dims(report.plan) == {("gate_up_proj", 1), ("down_proj", 2)}


class Kernel(nn.Module):
    """Torch's own operator, which computes in no float64, on rows whose groups data ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32)), nn.Parameter(torch.randn(4, 32, 16))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        ends = sizes.cumsum(0).to(torch.int32)
        hidden = nn.functional.grouped_mm(x.bfloat16(), self.up.bfloat16(), offs=ends).relu()
        return nn.functional.grouped_mm(hidden, self.down.bfloat16(), offs=ends).float()


@pytest.mark.parametrize("pins", [None, {"up": Shard(0), "down": Shard(0)}], ids=["as priced", "by expert"])
def test_torchs_own_kernel_is_compared_in_float64(pins: dict | None):
    report = autotp.verify(Kernel(), 2, (torch.randn(8, 16), torch.tensor([3, 0, 4, 1])), pins=pins)
    assert report, report
    split = {p.layout.sharded_dim for p in report.plan.parameters} if report.plan else set()
    assert split == ({0} if pins else {1, 2})


@pytest.mark.parametrize(
    "shapes", [((8, 16), (3, 16, 8)), ((3, 5, 16), (16, 8)), ((8, 8), (8, 8)), ((3, 5, 16), (3, 16, 8))]
)
def test_every_form_of_the_product_in_float64_is_the_kernels(shapes: tuple[tuple[int, ...], ...]):
    x, weight = (torch.randn(shape) for shape in shapes)
    ends = None if x.ndim == weight.ndim == 3 else torch.tensor([3, 4, 8], dtype=torch.int32)
    wanted = torch.ops.aten._grouped_mm(x.bfloat16(), weight.bfloat16(), ends).double()
    found = NARROW[torch.ops.aten._grouped_mm.default](x.bfloat16().double(), weight.bfloat16().double(), ends)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=5e-2)


def test_rows_of_other_ranks_are_masked(monkeypatch: pytest.MonkeyPatch):
    """The control: where the mask lets something through, the values of rows of other ranks are noticed to differ; no
    result is made of them here."""
    model = redrawn(mixture(num_hidden_layers=1))
    assert autotp.verify(model, 2, TOKENS, pins=BY_EXPERT).inside is None
    take = GroupedSpec.take
    for name in ("take", "place", "owned"):
        monkeypatch.setattr(GroupedSpec, name, lambda spec, x, rank, tp: take(spec, x, rank, tp) + 1e-3)
    report = autotp.verify(model, 2, TOKENS, pins=BY_EXPERT)
    assert report.inside is not None and "experts" in report.inside.module


@pytest.fixture(scope="module")
def wide() -> nn.Module:
    with torch.device("meta"):
        return mixture(hidden_size=512, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=8, head_dim=64)


def test_two_clusters_choose_differently(wide: nn.Module):
    """Split within, 16 of an expert's 128 columns are left to a rank: cheap where a product is computed in small tiles,
    dear on a systolic array 256 wide with fast memory."""
    tokens = {"input_ids": torch.zeros(4, 1024, dtype=torch.long)}
    small = autotp.Cluster.preset("a100-pcie")
    array = dataclasses.replace(small, name="systolic", matmul_tile=256, memory_bandwidth=8e12)
    within, whole = (autotp.plan(wide, 8, example_inputs=tokens, cluster=c) for c in (small, array))
    assert 0 not in {dim for _, dim in dims(within)}
    assert dims(whole) == {("gate_up_proj", 0), ("down_proj", 0)}
    again = Plan.from_json(whole.to_json())
    assert again == whole and again.decisions == whole.decisions
