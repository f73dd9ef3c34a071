"""Torch's own tools on a sharded module as it is: each does what it does on one device, or says why not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autotp
from tests.helpers.beside import EXACT, backward, pair, states_differ, whole
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn
from tests.helpers.modules.stacked import Stack, kept_bytes
from tests.helpers.modules.trained import model_of
from tests.helpers.modules.wrapped import Wrapper

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
