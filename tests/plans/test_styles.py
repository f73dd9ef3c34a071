"""A plan in the styles of torch and of transformers: a model sharded by those computes what autotp computes by it."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import autotp
from autotp.errors import PlanError
from autotp.plans.export.styles import Styles
from tests.helpers.models import inputs_of, transformer
from tests.helpers.processes.pool import Pool

CLOSE = 2e-6  # of the largest value: the models' norms compute in float32
ROWS = {"model.norm.weight": Replicate(), "lm_head.weight": Shard(0), "*.embed_tokens.weight": Shard(0)}


def model_of(name: str) -> Any:
    """In float64; `name` with "-32" in float32, where a norm has no casts between which a plan gathers."""
    return transformer(name.removesuffix("-32")).to(torch.float32 if name.endswith("-32") else torch.float64)


@cache
def plan_of(name: str, tp: int = 2, sequence: bool = False) -> autotp.Plan:
    model = model_of(name)
    pins = ROWS if sequence else None
    return autotp.plan(model, tp, example_inputs=inputs_of(model), sequence_parallel=sequence, pins=pins)


@cache
def styles_of(way: str, name: str, sequence: bool = False) -> Styles:
    plan = plan_of(name, sequence=sequence)
    return plan.to_parallelize_plan() if way == "torch" else plan.to_tp_plan()


def shard(model: Any, way: str, mesh: DeviceMesh, styles: Styles) -> Any:
    if way == "torch":
        return parallelize_module(model, mesh, dict(styles))
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # noqa: PLC0415  not in all versions

    model.tp_plan = dict(styles)
    return apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)[0]
    (out.square().mean() + (0.1 * out).sin().sum()).backward()
    return out.detach()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compared(rank: int, world: int, group: Any, way: str, name: str, styles: Styles, plan: autotp.Plan) -> Any:
    """How far output and gradients of a model sharded by the styles are from autotp's, and the names it split."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = model_of(name)
    inputs = inputs_of(model)
    ours = autotp.parallelize(copy.deepcopy(model), plan, mesh, example_inputs=inputs)
    theirs = shard(copy.deepcopy(model), way, mesh, styles)
    a, b = step(theirs, inputs), step(ours, inputs)
    have, want = {n: whole(p.grad) for n, p in theirs.named_parameters()}, ours.full_grad_dict()
    largest = max(float(g.abs().max()) for g in want.values())
    off = {n: float((have[n] - g).abs().max()) / largest for n, g in want.items()}
    split = {n for n, p in theirs.named_parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape}
    return float((a - b).abs().max() / b.abs().max()), max(off.values()), split


def check(pool: Pool, way: str, name: str, sequence: bool = False) -> set[str]:
    """The styles compute what autotp does; names of the parameters that they split."""
    if way == "transformers":
        pytest.importorskip("transformers.distributed.tensor_parallel", reason="an older transformers shards otherwise")
    styles, plan = styles_of(way, name, sequence), plan_of(name, sequence=sequence)
    results = pool.run(compared, way, name, styles, plan, world=2)
    for outputs, gradients, _ in results:
        assert outputs < CLOSE and gradients < CLOSE, (outputs, gradients)
    return results[0][2]


def planned(name: str) -> set[str]:
    """Names of the parameters that the plan splits."""
    return {n for n, x in plan_of(name).placements.items() if str(x) != "I"}


@pytest.mark.parametrize("way", ["torch", "transformers"])
@pytest.mark.parametrize("name", ["llama"])
def test_all_of_it_can_be_said(pool: Pool, way: str, name: str):
    assert check(pool, way, name) == planned(name)
    styles = styles_of(way, name)
    assert not styles.cannot
    assert f"model.layers.{'*' if way == 'transformers' else 1}.self_attn.q_proj" in styles


def test_the_names_of_the_styles():
    styles, parts = styles_of("transformers", "qwen3"), "model.layers.*.self_attn."
    # Each rank would see its own heads of the norm.
    assert styles[f"{parts}q_proj"] == "colwise_gather_output" and styles[f"{parts}o_proj"] == "rowwise_split_input"
    assert styles["model.layers.*.mlp.up_proj"] == "colwise" and styles["model.layers.*.mlp.down_proj"] == "rowwise"
    assert styles["model.embed_tokens"] == "embedding_colwise" and styles["lm_head"] == "colwise_gather_output"
    assert styles_of("transformers", "qwen3", True)["model.embed_tokens"] == "embedding_rowwise"
    assert styles["model.layers.*.input_layernorm"] == "replicate"  # else the model's own rule would hold


@pytest.mark.parametrize(
    ("way", "name", "left_whole", "words"),
    [
        ("torch", "bert", {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}, "tied"),
        ("torch", "gpt2", None, "aten.addmm in transformer.h.*.attn.c_attn reads it, and no style is for that"),
        ("torch", "gptj", set(), "the code of transformer.h.*.attn does not run on a part (shape '[2, 16, 8, 8]'"),
        ("torch", "phi3", set(), "a part is several pieces"),
        ("transformers", "qwen3", set(), "q_norm.weight is a sum over parts"),
        ("transformers", "llama-uneven", set(), "129 are not split evenly"),
    ],
)
def test_what_cannot_be_said_is_listed_and_the_rest_is_right(pool: Pool, way: str, name: str, left_whole, words: str):
    split = check(pool, way, name)
    assert any(words in line for line in styles_of(way, name).cannot), styles_of(way, name).cannot
    assert left_whole is None or planned(name) - split == left_whole


@pytest.mark.parametrize("way", ["torch", "transformers"])
def test_sequence_parallelism_is_what_no_style_says(pool: Pool, way: str):
    check(pool, way, "llama-32", sequence=True)
    cannot = styles_of(way, "llama-32", sequence=True).cannot
    assert any("no style splits batch or sequence between modules" in x for x in cannot), cannot


def counted(rank: int, world: int, group: Any, styles: Styles) -> dict[str, int]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = model_of("llama-32")
    sharded = shard(model, "torch", mesh, styles)
    with warnings.catch_warnings(), CommDebugMode() as counts:
        warnings.filterwarnings("ignore", ".*ackward hook")  # the counter sets hooks on everything
        step(sharded, inputs_of(model))
    return {str(op): n for op, n in counts.get_comm_counts().items()}


def test_torch_sends_what_the_plan_says_and_each_module_its_own(pool: Pool):
    """The plan sums the gradients of q, k and v as one, and of gate and up; by styles each module sums its own."""
    styles, layers = styles_of("torch", "llama-32"), 2
    made = [c for c in plan_of("llama-32").collectives if c.op != "parameter"]
    wanted = Counter(p for c in made for p in (c.forward, c.backward) if p)  # a DTensor's gradient stays a sum
    wanted["all_reduce"] += 3 * layers
    for counts in pool.run(counted, styles, world=2):
        names = {op.split(".")[1].removesuffix("_into_tensor").removesuffix("_tensor"): n for op, n in counts.items()}
        assert names == wanted, (names, wanted)


def test_a_missing_style_would_be_noticed(pool: Pool):
    split = {"gate_proj", "up_proj"}
    styles = Styles({k: v for k, v in styles_of("torch", "llama").items() if k.rpartition(".")[2] not in split})
    # The down projection takes whole rows for a part.
    with pytest.raises(Exception, match="must have same reduction dim"):
        pool.run(compared, "torch", "llama", styles, plan_of("llama"), world=2)


def loaded(rank: int, world: int, group: Any, folder: str, styles: Styles) -> tuple[float, set[str]]:
    """How far a model that transformers itself loads by the plan is from the original, and what it split."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415

    config = DistributedConfig(tp_size=world, tp_plan=dict(styles))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    model = model_of("llama-tied-32")
    with torch.no_grad():
        a, b = (m(**inputs_of(model))[0] for m in (theirs, model))
    split = {n for n, p in theirs.named_parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape}
    return float((a - b).abs().max() / b.abs().max()), split


def test_transformers_loads_by_the_plan(pool: Pool, tmp_path):
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="an older transformers shards otherwise")
    pytest.importorskip("accelerate", reason="transformers asks for it to load with a plan")
    model_of("llama-tied-32").save_pretrained(tmp_path)
    plan = plan_of("llama-tied-32", tp=4)
    for apart, split in pool.run(loaded, str(tmp_path), plan.to_tp_plan()):
        assert apart < CLOSE
        assert split == {n for n, x in plan.placements.items() if str(x) != "I" and "embed_tokens" not in n}  # tied


@pytest.mark.parametrize("method", ["to_parallelize_plan", "to_tp_plan"])
def test_a_loaded_plan_says_what_to_do(method: str):
    plan = autotp.Plan.from_json(plan_of("llama").to_json())
    with pytest.raises(PlanError, match=rf"{method} reads the graph .* like=plan"):
        getattr(plan, method)()
