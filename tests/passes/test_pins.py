"""Pins: parameters, module outputs, the model's ends, logical axes; what is impossible names the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autotp
from autotp.driver.compile import apply_plan, solve_plan
from autotp.driver.options import Options, Steering
from autotp.errors import InputError, PlanError
from autotp.plans.plan import Plan
from autotp.proof.equality import compare
from autotp.text import read_bytes
from tests.helpers.models import HIDDEN, build, captured, planned, values


def pinned(name: str, tp: int, pins: dict[str, Any], **options: Any) -> Plan:
    return solve_plan(*captured(name), Options.read(tp, Steering(pins=pins, **options)), name)


def proved(name: str, plan: Plan) -> bool:
    """Whether the ranks under a plan compute what the model computes."""
    return compare(*apply_plan(captured(name)[0], plan, Options.of_plan(plan)), values(name)).ok


def of(plan: Plan, ending: str) -> set[str]:
    return {str(p.layout) for p in plan.parameters if p.name.endswith(ending)}


# parameters


def test_a_pin_on_one_of_several_equal_blocks_holds_for_that_one():
    assert of(planned("llama", 2)[0], "up_proj.weight") == {"S(0)"}
    plan = pinned("llama", 2, {"model.layers.1.mlp.up_proj.weight": Replicate()})
    assert of(plan, "layers.0.mlp.up_proj.weight") == {"S(0)"} and of(plan, "layers.1.mlp.up_proj.weight") == {"I"}


def test_equal_blocks_with_equal_pins_are_still_solved_once():
    plan = pinned("llama", 2, {"model.layers.*.mlp.up_proj.weight": Replicate()})
    assert all(p.first.startswith("model.layers.0") for p in plan.parameters if ".layers." in p.name)


# module outputs


@pytest.mark.parametrize(
    ("placement", "change"),
    [(Shard(1), "P -> S(1)"), (Shard(2), "P -> S(2)"), (Shard(-1), "P -> S(2)"), (Replicate(), "P -> I")],
)
def test_a_module_output_is_read_as_pinned(placement, change):
    plan = pinned("llama-short", 2, {"model.layers.*.mlp:output": placement})
    assert [c.change for c in plan.collectives if "down_proj" in c.source] == [change]
    assert proved("llama-short", plan)


def test_a_pin_on_one_block_leaves_the_other():
    plan = pinned("llama", 2, {"model.layers.0.mlp:output": Shard(1)})
    assert [c.change for c in plan.collectives if "down_proj" in c.source] == ["P -> S(1)", "P -> I"]


# the model's ends


def test_outputs():
    split = pinned("llama-short", 2, {":output.logits": Shard(2)})
    assert of(split, "lm_head.weight") == {"S(0)"}
    assert Plan.from_json(split.to_json()) == split
    for sharded, layout in (("full", "I"), ("sharded", "S(2)")):
        program = apply_plan(captured("llama-short")[0], split, Options.of_plan(split), sharded)[1]
        assert str(program.result(0)[0]) == layout
    assert proved("llama-short", pinned("llama-short", 2, {":output": Shard(1)}))


def test_inputs():
    free = planned("llama-short", 2)[0]
    assert pinned("llama-short", 2, {":input.input_ids": Replicate()}).placements == free.placements
    plan = pinned("llama-short", 2, {":input.input_ids": Shard(1)})
    assert str(plan.decisions["embedding"].ins[1]) == "S(1)" and proved("llama-short", plan)


# axes


@pytest.mark.parametrize(
    ("axis", "ending", "split", "whole"),
    [
        ("mlp", "down_proj.weight", "S(1)", "S(0)"),
        ("heads", "q_proj.weight", "S(0)", None),
        ("vocab", "lm_head.weight", "S(0)", "S(1)"),
        ("embed", "up_proj.weight", "S(1)", "S(0)"),
    ],
)
def test_an_axis_is_dealt_or_not(axis, ending, split, whole):
    for placement, want in ((Shard(0), split), (Replicate(), whole)):
        plan = pinned("llama-short", 2, {axis: placement})
        assert want is None or of(plan, ending) == {want}
        assert proved("llama-short", plan)


def test_heads_may_be_kept_together():
    heads = [b.local for b in pinned("llama-short", 2, {"heads": Replicate()}).blocks if b.kind == "attention"]
    assert heads == ["8 heads, 4 kv heads"]


def test_the_sequence_axis_is_sequence_parallelism():
    for placement, forced in ((Shard(0), True), (Replicate(), False)):
        assert pinned("llama-short", 2, {"sequence": placement}) == pinned(
            "llama-short", 2, {}, sequence_parallel=forced
        )
    with pytest.raises(InputError, match="contradict"):
        pinned("llama-short", 2, {"sequence": Shard(0)}, sequence_parallel=False)


def test_the_batch_is_never_dealt():
    assert pinned("llama-short", 2, {"batch": Replicate()}).placements == planned("llama-short", 2)[0].placements
    with pytest.raises(PlanError, match=r"'batch': Shard\(0\) cannot be kept: aten.embedding in model.embed_tokens"):
        pinned("llama-short", 2, {"batch": Shard(0)})


# what is impossible


class Inverse(nn.Module):
    """The inverse has no rule; layer_norm works along the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.norm = nn.Parameter(torch.eye(HIDDEN)), nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x @ torch.linalg.inv(self.mixing))[..., :HIDDEN])


IMPOSSIBLE = {
    "no rule": ({"mixing": Shard(0)}, PlanError, r"'mixing': Shard\(0\).*aten.linalg_inv.*reads mixing as I, R only"),
    "norm": (
        {"norm.weight": Shard(0)},
        PlanError,
        r"'norm.weight'.*aten.layer_norm in norm reads norm.weight as I, R only",
    ),
    "dimension": ({"up.weight": Shard(2)}, PlanError, "which has 2 dimensions"),
    "output": ({":output": Shard(5)}, PlanError, "which has 3 dimensions"),
    "reader": ({"up:output": Shard(0)}, PlanError, r"'up:output': Shard\(0\) cannot be kept: .* can read it as"),
    "no module": ({"upp:output": Shard(1)}, InputError, "fits no module.*up"),
    "no input": ({":input.y": Shard(1)}, InputError, "fits no input.*:input.x"),
    "no output": ({":output.7": Shard(1)}, InputError, "fits no output.*:output.0"),
    "no axis": ({"heads": Shard(0)}, InputError, "no axis 'heads'"),
    "axis' dimension": ({"embed": Shard(1)}, InputError, "an axis is one dimension"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_is_impossible_names_what_forbids_it(what):
    pins, kind, text = IMPOSSIBLE[what]
    with pytest.raises(kind, match=f"(?s){text}"):
        autotp.plan(Inverse(), 2, example_inputs=torch.randn(4, 6, HIDDEN), pins=pins, check_capture=False)


def test_pins_that_contradict_each_other_are_named():
    fine = {"model.norm.weight": Replicate(), "heads": Shard(0), "*.k_proj.weight": Shard(1)}
    assert of(pinned("llama-short", 2, fine), "k_proj.weight") == {"S(1)"}  # sums of k's columns are dealt by heads
    with pytest.raises(PlanError, match="no legal plan keeps these pins together") as error:
        pinned("llama-short", 2, fine | {"sequence": Replicate()})  # nothing may be dealt but by a split weight
    assert "'heads'" in str(error.value) and "'sequence'" in str(error.value) and "model.norm" not in str(error.value)


def test_a_finished_plan_takes_no_pins():
    model, inputs = build("llama-short")
    plan = planned("llama-short", 2)[0]
    steering: list[dict[str, Any]] = [
        {"pins": {"*": Replicate()}},
        {"memory": "1GB"},
        {"within_node": True},
        {"objective": "decode"},
    ]
    for given in steering:
        with pytest.raises(InputError, match="plan= is complete"):
            autotp.verify(model, 2, inputs, plan=plan, **given)
        with pytest.raises(InputError, match="plan= is complete"):
            autotp.compile(model, plan=plan, example_inputs=inputs, **given)


# memory, and groups that stay in their node


def test_a_budget_changes_the_plan_or_says_what_the_least_is():
    least = planned("llama-short", 2)[0].totals.parameter_bytes
    with pytest.raises(PlanError, match=r"no plan fits into memory=\S+ KiB per rank: the leanest .*holds") as error:
        pinned("llama-short", 2, {}, memory=least)
    told = str(error.value).splitlines()
    assert len(told) == 7 and any("weight" in line for line in told[1:6])
    assert pinned("llama-short", 2, {}, memory="1GB") == planned("llama-short", 2)[0]


@pytest.mark.parametrize(
    ("text", "nbytes"), [(7, 7), (2.5e9, 2.5e9), ("80GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("512", 512), ("3kb", 3e3)]
)
def test_budgets_are_read(text: Any, nbytes: float):
    assert read_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "80 G", "GB", -1, 0, True, float("nan"), float("inf"), "1.2.3GB", [1]])
def test_what_is_no_budget(text: Any):
    with pytest.raises(InputError, match="memory="):
        read_bytes(text)


def test_a_group_may_be_kept_in_its_node():
    cluster = replace(autotp.Cluster.preset("h100"), devices_per_node=2)
    assert Options.read(2, Steering(cluster=cluster, within_node=True)) and Options.read(4, Steering(cluster=cluster))
    with pytest.raises(PlanError, match="tp=4 leaves the node.*at most 2 ranks.*devices_per_node"):
        Options.read(4, Steering(cluster=cluster, within_node=True))
