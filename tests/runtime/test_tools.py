"""Torch's own tools on a sharded module as it is: each does what it does on one device, or says why not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autotp
from autotp import compat
from autotp.comm import collectives
from autotp.errors import StateError
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn
from tests.helpers.stacked import Block, Stack, kept_bytes
from tests.helpers.trained import model_of
from tests.helpers.wrapped import Wrapper

EXACT = 1e-10  # of gradients in float64


def pair(group: Any, name: str = "gpt2", change: Callable[[Any], Any] = lambda m: m) -> tuple[Any, Any, dict]:
    """A model in float64, itself and sharded, and its inputs."""
    model: Any = model_of(name, torch.float64)
    change(model)
    inputs = inputs_of(model)
    return model, autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group)), inputs


def backward(module: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss = module(**inputs).logits.square().mean()
    loss.backward()
    return loss


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def states_differ(sharded: Any, model: nn.Module) -> float:
    """Largest difference of a parameter."""
    state = sharded.full_state_dict()
    return max(float((state[n] - t).abs().max()) for n, t in model.state_dict().items())


# ---- clipping, optimizers, scaling -----------------------------------------------------------------------------------


def norms(rank: int, world: int, group: Any) -> dict[Any, float]:
    """Every norm and way to compute it; then what clipping leaves."""
    model, sharded, inputs = pair(group)
    for m in (model, sharded):
        backward(m, inputs)
    found: dict[Any, float] = {}
    for kind in (2.0, 1.0, 3.0, math.inf):
        for foreach in (None, True, False):
            both = [
                whole(nn.utils.clip_grad_norm_(m.parameters(), 1e9, norm_type=kind, foreach=foreach))
                for m in (sharded, model)
            ]
            found[kind, foreach] = difference(*both)
    small = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.01)) for m in (sharded, model)]
    found["small"], found["clipped"] = difference(*small), gradients_differ(sharded, model)
    for m in (model, sharded):
        nn.utils.clip_grad_value_(m.parameters(), 1e-5)
    found["values"] = gradients_differ(sharded, model)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_norm_is_that_of_the_whole_gradients(pool, world):
    for found in pool.run(norms, world=world):
        assert max(found.values()) < EXACT, found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
}


def optimizing(rank: int, world: int, group: Any) -> dict[str, float]:
    found = {}
    model, sharded, inputs = pair(group)
    for name, make in OPTIMIZERS.items():
        optimizers = [make(m.parameters()) for m in (model, sharded)]
        for _ in range(3):
            for m, optimizer in zip((model, sharded), optimizers, strict=True):
                backward(m, inputs)
                optimizer.step()
                optimizer.zero_grad()
        found[name] = states_differ(sharded, model)
    return found


def test_optimizers_take_the_same_steps(pool):
    for found in pool.run(optimizing, world=2):
        assert max(found.values()) < 1e-8, found


def scaling(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Clipped steps with a gradient scaler; then an overflow on the last rank alone."""
    model, sharded, inputs = pair(group)
    for m in (model, sharded):
        m.float()
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, sharded)]
    for _ in range(2):
        for m, scaler, optimizer in zip((model, sharded), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(m(**inputs).logits.square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    found = {"state": states_differ(sharded, model), "scales": [scaler.get_scale() for scaler in scalers]}
    return {**found, **overflowing(sharded, inputs, rank == world - 1)}


def overflowing(sharded: Any, inputs: dict[str, Tensor], here: bool) -> dict[str, Any]:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(sharded.parameters(), lr=1.0)
    optimizer.zero_grad()
    scaler.scale(sharded(**inputs).logits.square().mean()).backward()
    if here:
        sharded.transformer.h[0].mlp.c_fc.weight.grad.to_local()[0, 0] = math.inf
    before = [p.to_local().clone() for p in sharded.parameters()]
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, p.to_local()) for a, p in zip(before, sharded.parameters(), strict=True))
    return {"skipped": same, "backed off": scaler.get_scale()}


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool):
    for found in pool.run(scaling, world=2):
        assert found["state"] < 1e-6 and found["scales"] == [2048.0, 2048.0], found
        assert found["skipped"] and found["backed off"] == 32.0, found


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def recomputing(rank: int, world: int, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("layers", "reentrant", "sequential", "closures"):
        torch.manual_seed(0)
        model = redrawn(Stack(way)).double()
        x = torch.randn(8, 16).double().requires_grad_()
        sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
        calls: list[int] = []
        sharded.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        for m in (model, sharded):
            m(x).square().mean().backward()
        kept = kept_bytes(sharded, x), 0 if way == "reentrant" else kept_bytes(model, x)
        found[way] = gradients_differ(sharded, model), *kept, len(calls)
    return found


def test_regions_that_the_model_checkpoints_are_kept(pool):
    for found in pool.run(recomputing, world=2):
        for way, (gradients, kept, wanted, _) in found.items():
            assert gradients < EXACT, found
            assert kept <= (wanted or found["layers"][2]), (way, found)
        assert found["layers"][3] == 3  # forward, again in the backward, and where what is kept is measured


def dropping(rank: int, world: int, group: Any) -> list[float]:
    """Gradients with dropout in the layers, checkpointed beside not checkpointed, from one seed; then from two."""
    x, grads = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double(), []
    for way, seed in (("layers", 5), ("none", 5), ("layers", 6)):
        torch.manual_seed(0)
        model = Stack(way)
        for layer in model.layers:
            layer.up = nn.Sequential(layer.up, nn.Dropout(0.5))  # type: ignore[arg-type, assignment]
        sharded: Any = autotp.compile(redrawn(model).double(), example_inputs=x, mesh=mesh_of(group))
        torch.manual_seed(seed)
        sharded(x).square().mean().backward()
        grads.append(sharded.full_grad_dict()["layers.0.up.0.weight"])
    return [difference(grads[0], grads[1]), difference(grads[0], grads[2])]


def test_dropout_in_a_region_draws_the_same_again(pool):
    for same, other in pool.run(dropping, world=2):
        assert same < EXACT and other > 1e-2


def library(rank: int, world: int, group: Any) -> dict[str, Any]:
    """transformers' own switch, on a model with fused weights."""
    found = {}
    for name in ("gpt2", "llama"):

        def switch(m: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that another name for it will come
                m.gradient_checkpointing_enable({"use_reentrant": False})

        model, sharded, inputs = pair(group, name, switch)
        plain = pair(group, name)[1]
        for m in (model, sharded):
            backward(m, inputs)
        found[name] = gradients_differ(sharded, model), kept_bytes(sharded, **inputs) / kept_bytes(plain, **inputs)
    return found


def test_transformers_own_switch_is_kept(pool):
    for found in pool.run(library, world=2):
        assert max(x[0] for x in found.values()) < EXACT and max(x[1] for x in found.values()) < 0.5, found


# ---- accumulation, modes, freezing, hooks ----------------------------------------------------------------------------


def accumulating(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Micro-batches of several sizes; between them an evaluation that must leave no trace."""
    model, sharded, inputs = pair(group)
    found: dict[Any, float] = {}
    for seed, rows in enumerate((2, 3, 1)):
        other = inputs_of(model, rows, 8 + seed, seed)
        for m in (model, sharded):
            backward(m, other)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                values = [m(**other).logits for m in (sharded, model)]
            found[context.__name__, rows] = difference(*values)
            assert not values[0].requires_grad and values[0].is_inference() == values[1].is_inference()
    found["gradients"] = gradients_differ(sharded, model)
    return found


def test_gradients_accumulate_and_evaluation_leaves_no_trace(pool):
    for found in pool.run(accumulating, world=2):
        assert max(found.values()) < EXACT, found


def collectives_of(run: Callable[[], Any]) -> int:
    with patch.object(collectives, "real", wraps=collectives.real) as real:
        run()
    return real.call_count


def freezing(rank: int, world: int, group: Any) -> dict[str, Any]:
    """The embeddings and the first of two layers frozen, and then all but one bias."""
    model, sharded, inputs = pair(group, "llama-bias")
    found: dict[str, Any] = {}
    loss = sharded(**inputs).logits.square().mean()
    found["all"] = collectives_of(loss.backward)
    for name, frozen in {
        "lower": lambda n: n.startswith(("model.embed", "model.layers.0")),
        "nearly all": lambda n: n != "model.layers.1.mlp.down_proj.bias",
    }.items():
        for m in (model, sharded):
            m.zero_grad()
            for n, p in m.named_parameters():
                p.requires_grad_(not frozen(n))
        loss = sharded(**inputs).logits.square().mean()
        found[name] = collectives_of(loss.backward)
        backward(model, inputs)
        found[f"{name} gradients"] = gradients_differ(sharded, model)  # of the same parameters
        for m in (model, sharded):
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1).step()
        found[f"{name} state"] = states_differ(sharded, model)
    return found


def test_frozen_parameters_have_no_gradient_and_send_nothing(pool):
    for found in pool.run(freezing, world=2):
        assert max(found["lower gradients"], found["nearly all gradients"]) < EXACT, found
        assert max(found["lower state"], found["nearly all state"]) < 1e-8, found
        assert found["nearly all"] < found["lower"] < found["all"], found
        assert found["all"] == 5  # f of two attentions, two feed-forwards and the head
        assert found["lower"] == 3 and found["nearly all"] == 1, found


def hooking(rank: int, world: int, group: Any) -> tuple[list[Any], list[Any]]:
    model, sharded, inputs = pair(group, "llama")
    logs: list[list[Any]] = []
    for m in (model, sharded):
        log: list[Any] = []
        logs.append(log)
        layer, weight = m.model.layers[1], m.model.norm.weight
        layer.register_forward_pre_hook(lambda _, args, log=log: log.append(("pre", args[0].detach().clone())))
        layer.register_forward_hook(
            lambda *a, log=log: log.append(("out", compat.tree_leaves(a[2])[0].detach().clone()))
        )
        layer.register_full_backward_hook(lambda _, to, of, log=log: log.append(("to", to[0].clone())))
        layer.mlp.register_full_backward_pre_hook(lambda _, of, log=log: log.append(("of", of[0].clone())))
        weight.register_hook(lambda g, log=log: log.append(("gradient", whole(g).clone())))
        weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(("grad", whole(p.grad).clone())))
        backward(m, inputs)
    return logs[0], logs[1]


def test_hooks_of_modules_and_parameters_see_what_they_saw(pool):
    for wanted, found in pool.run(hooking, world=2):
        assert len(found) == len(wanted) == 6 and dict(found).keys() == dict(wanted).keys()
        assert max(difference(value, dict(wanted)[name]) for name, value in found) < EXACT


# ---- data parallelism around it --------------------------------------------------------------------------------------


def two_meshes(rank: int, world: int, group: Any) -> dict[str, Any]:
    """fully_shard per layer, each layer checkpointed, over tp; clipping and fused AdamW on both axes' parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = model_of("gpt2", torch.float64)
    batch = inputs_of(model, 4)
    mine = {k: v.chunk(2)[mesh["dp"].get_local_rank()] for k, v in batch.items()}
    sharded: Any = autotp.compile(model, example_inputs=mine, mesh=mesh)
    for m in (model, sharded):
        m.transformer.wpe.requires_grad_(False)
    layers = sharded.transformer.h
    for i, layer in enumerate(list(layers)):
        layers[i] = fully_shard(Wrapper(layer), mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    found: dict[str, Any] = {"norms": []}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, sharded)]
    for _ in range(2):
        for m, optimizer, inputs in zip((model, sharded), optimizers, (batch, mine), strict=True):
            optimizer.zero_grad()
            backward(m, inputs)
            found["norms"].append(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)).item())
            optimizer.step()
    found["state"] = states_differ(sharded, model)
    found["part"] = sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters())
    dist.barrier()
    return found


def test_fully_shard_per_layer_with_clipping_and_checkpointing(pool):
    for found in pool.run(two_meshes):
        assert found["norms"][::2] == pytest.approx(found["norms"][1::2], rel=EXACT), found
        assert found["state"] < 1e-8 and found["part"] < 0.35, found


def lean_over_dp(rank: int, world: int, group: Any) -> float:
    """Layers that checkpoint themselves, whose weights are gathered over dp before use."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, x = redrawn(Stack("layers")).double(), torch.randn(8, 16).double()
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    sharded: Any = autotp.compile(model, dp=2, fully_shard=True, mesh=mesh, example_inputs=mine)
    for m, inputs in ((model, x), (sharded, mine)):
        m(inputs).square().mean().backward()
    return gradients_differ(sharded, model)


def test_checkpointed_regions_with_weights_over_dp(pool):
    assert max(pool.run(lean_over_dp)) < EXACT


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def adapted(name: str, targets: list[str]) -> Any:
    """A model with PEFT's adapters, as PEFT makes it but for adapters that do something from the start."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, that PEFT uses what will be renamed
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "gpt2")
        model = peft.get_peft_model(model_of(name, torch.float64), config)
    generator = torch.Generator().manual_seed(2)
    for n, p in model.named_parameters():
        if "lora_" in n:
            p.data = 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


ROLES = {
    "self_attn.q_proj": ("whole", "column-parallel"),
    "self_attn.o_proj": ("row-parallel", "whole"),
    "mlp.up_proj": ("whole", "column-parallel"),
    "mlp.down_proj": ("row-parallel", "whole"),
}


def adapting(rank: int, world: int, group: Any) -> dict[str, Any]:
    model = adapted("llama", [x.partition(".")[2] for x in ROLES])
    inputs = inputs_of(model.base_model.model)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group))
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in (model, sharded)]
    found: dict[str, Any] = {"gradients": []}
    for _ in range(3):
        losses = []
        for m, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(backward(m, inputs))
            optimizer.step()
        found["gradients"] += [gradients_differ(sharded, model), difference(losses[1], losses[0])]
    found["graded"] = all("lora_" in n for n in sharded.full_grad_dict())
    found["roles"] = {p.name: p.role for p in sharded.plan.parameters}
    found["state"] = states_differ(sharded, model)
    return found


def test_adapters_on_split_layers_are_split_with_them(pool):
    pytest.importorskip("peft")
    for found in pool.run(adapting, world=2):
        assert max(found["gradients"]) < EXACT and found["state"] < 1e-8 and found["graded"], found
        for layer, roles in ROLES.items():
            name = f"base_model.model.model.layers.1.{layer}"
            assert tuple(found["roles"][f"{name}.lora_{x}.default.weight"] for x in "AB") == roles, layer
            assert found["roles"][f"{name}.base_layer.weight"] in roles


@pytest.mark.parametrize("name, targets", [("gpt2", ["c_attn", "c_proj"]), ("bert", ["query", "dense"])])
def test_adapters_of_fused_and_transposed_weights(name, targets):
    model = adapted(name, targets)
    report = autotp.verify(model, 2, inputs_of(model.base_model.model))
    assert report, str(report)


def test_adapters_follow_a_fused_weight_where_that_is_split():
    """In a tiny model the whole adapter is cheaper than what splitting sends; this one is as wide as GPT-2's."""
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(n_embd=768, n_head=12, n_layer=1, use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapters = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters).eval()
    plan = autotp.plan(model, 2, example_inputs={"input_ids": torch.zeros(4, 512, dtype=torch.long)})
    roles = {p.name.partition("c_attn.")[2]: p.role for p in plan.parameters if "c_attn." in p.name}
    assert roles["base_layer.weight"] == roles["lora_B.default.weight"] == "column-parallel"
    assert roles["lora_A.default.weight"] == "whole"


# ---- what is not there -----------------------------------------------------------------------------------------------


def refusing(rank: int, world: int, group: Any) -> list[str]:
    model, sharded, inputs = pair(group)
    said = []
    for wrapped in (sharded, sharded.transformer.h[0]):
        with pytest.raises(StateError) as error:
            nn.parallel.DistributedDataParallel(wrapped, process_group=group)
        said.append(str(error.value))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = {k: v.chunk(2)[mesh["dp"].get_local_rank()] for k, v in inputs.items()}
    spread: Any = autotp.compile(model, dp=2, mesh=mesh, example_inputs=mine)
    with pytest.raises(StateError) as error:
        torch.autograd.grad(spread(**mine).logits.sum(), list(spread.parameters()), create_graph=True)
    return [*said, str(error.value)]


def test_what_is_not_supported_is_refused_with_a_sentence(pool):
    for one, two, three in pool.run(refusing):
        assert "dp=" in one and one == two
        assert "create_graph=True" in three and "without dp" in three


def twice(rank: int, world: int, group: Any) -> dict[str, float]:
    """Over tp alone gradients of gradients are right: of inputs (a gradient penalty), and of parameters."""
    torch.manual_seed(0)
    found, model = {}, redrawn(nn.Sequential(Block(), Block(), nn.Linear(16, 32))).double()
    x = torch.randn(8, 16).double().requires_grad_()
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group))
    for of in ("inputs", "parameters"):
        for m in (model, sharded):
            m.zero_grad()
            wanted = [x] if of == "inputs" else list(m.parameters())
            grads = torch.autograd.grad(m(x).square().mean(), wanted, create_graph=True)
            whole(sum(g.square().sum() for g in grads)).backward()
        found[of] = gradients_differ(sharded, model)
    return found


def test_gradients_of_gradients_over_tp(pool):
    for found in pool.run(twice, world=4):
        assert max(found.values()) < EXACT, found
