"""On ranks a sharded module is used like the original: modes, wrappers, buffers, optimizers, fully_shard."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autotp
from autotp.driver import compile as pipeline
from autotp.runtime import storage
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn, transformer
from tests.helpers.modules.counting import Counting
from tests.helpers.modules.wrapped import Wrapper


def using(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Everything at tp=2 that needs no optimizer, on a Llama with dropout in its attention and a tied head."""
    with (
        patch.object(pipeline, "prepare", wraps=pipeline.prepare) as captures,
        patch.object(storage.Unwrap, "apply", wraps=storage.Unwrap.apply) as unwraps,
    ):
        return {"buffers": buffers(group), **modes(group, captures, unwraps)}


def modes(group: Any, captures: Mock, unwraps: Mock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = transformer("llama-tied", attention_dropout=0.2).train()
    inputs, other = inputs_of(model), inputs_of(model, 3, 7, seed=1)
    sharded: Any = autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group), random="torch")
    captures.reset_mock()
    unwraps.reset_mock()

    def both(change: Any = lambda m: None, inputs: Any = inputs, context: Any = None) -> tuple[float, float]:
        change(model)
        change(sharded)
        outputs = []
        for m in (model, sharded):
            m.zero_grad()
            torch.manual_seed(3)
            with context or torch.enable_grad():
                outputs.append(m(**inputs).logits)
            outputs[-1].float().square().mean().backward()
        return difference(outputs[1], outputs[0]), gradients_differ(sharded, model)

    found["dropout"] = both(), both(inputs=other)
    found["unwraps"] = unwraps.call_count / 2
    found["eval"] = both(lambda m: m.eval())
    found["captures"] = captures.call_count
    found["again"] = both(lambda m: m.train()), both(lambda m: m.eval(), other), captures.call_count
    found["autocast"] = both(context=torch.autocast("cpu", torch.bfloat16))

    sharded(**inputs).logits.div_(2)  # what comes out is the user's
    layers = sharded.model.layers
    layers[0] = Wrapper(layers[0])
    found["checkpointed"] = both(lambda m: m.train()), layers[0].calls
    twin = copy.deepcopy(sharded)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    found["twin"] = float(twin(**inputs).logits.detach().abs().max()), both()
    found["tied"] = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    found["bfloat16"] = both(lambda m: m.to(torch.bfloat16).eval())
    found["tied after to"] = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    return found


def buffers(group: Any) -> float:
    """Largest difference of a buffer after two calls in training mode."""
    torch.manual_seed(0)
    model, x = redrawn(Counting()), torch.randn(4, 16)
    sharded: Any = autotp.compile(model, example_inputs=x, mesh=mesh_of(group), random="torch")
    for m in (model, sharded):
        for step in range(2):
            torch.manual_seed(step)
            m(x)
    pairs = ((sharded.get_buffer(n), b) for n, b in model.named_buffers(remove_duplicate=False))
    return max(difference(found.float(), wanted.float()) for found, wanted in pairs)


def test_two_ranks_use_it_like_the_original(pool):
    for rank, found in enumerate(pool.run(using, world=2)):
        close = [found["eval"], found["twin"][1], found["checkpointed"][0], *found["dropout"], *found["again"][:2]]
        assert max(max(x) for x in close) < 1e-5, found
        assert found["buffers"] < 1e-6, found["buffers"]
        assert found["unwraps"] == 3  # the root and two layers, once each
        assert found["captures"] == found["again"][2] == (rank == 0)  # the group's first captures for all
        assert found["checkpointed"][1] == 1 and found["twin"][0] == 0
        assert found["tied"] and found["tied after to"]
        for low in ("autocast", "bfloat16"):  # eight bits: sums in another order differ by that
            assert max(found[low]) < 0.05, found


def training(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Two clipped AdamW steps of six heads and an odd vocabulary on four ranks."""
    six = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 257}
    model = transformer("llama-tied", **six).double()  # Adam's first steps blow rounding up
    sharded: Any = autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh_of(group))
    meshes = {p.device_mesh for p in sharded.parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, sharded)]
    found: dict[str, Any] = {"norms": [], "meshes": len(meshes)}
    for step in range(2):
        inputs = inputs_of(model, seed=step)
        for m in (model, sharded):
            scores = m(**inputs).logits.flatten(0, 1)  # not labels=: transformers takes the loss in float32
            nn.functional.cross_entropy(scores, inputs["input_ids"].flatten()).backward()
        found.setdefault("gradients", []).append(gradients_differ(sharded, model))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, sharded)]
        full = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        found["norms"].append(difference(full, norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = sharded.full_state_dict()
    found["state"] = max(float((state[n] - t).abs().max()) for n, t in model.state_dict().items())
    found["part"] = sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters())
    return found


def test_optimizers_and_clipping_work_on_the_shards(pool):
    for found in pool.run(training):
        assert found["meshes"] == 1 and found["part"] < 0.5, found
        assert max(found["norms"]) < 1e-10 and max(found["gradients"]) < 1e-10, found
        assert found["state"] < 1e-8, found


def sharding_data(rank: int, world: int, group: Any) -> dict[str, Any]:
    """FSDP per layer over dp on top of tp: a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = transformer("llama-tied")
    sharded: Any = autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    whole = inputs_of(model, 4)
    mine = {k: v.chunk(2)[mesh["dp"].get_local_rank()] for k, v in whole.items()}
    logits = sharded(**mine).logits
    logits.square().mean().backward()
    wanted = model(**whole).logits
    wanted.square().mean().backward()
    found: dict[str, Any] = {
        "outputs": difference(logits, wanted.chunk(2)[mesh["dp"].get_local_rank()].clone()),
        "gradients": gradients_differ(sharded, model),
        "part": sum(p.to_local().numel() for p in sharded.parameters()) / sum(p.numel() for p in model.parameters()),
    }
    state = {n: t.clone() for n, t in sharded.full_state_dict().items()}
    found["state"] = max(difference(state[n], t) for n, t in model.state_dict().items())
    torch.optim.AdamW(sharded.parameters(), lr=0.1).step()
    found["moved"] = difference(sharded.full_state_dict()["lm_head.weight"], state["lm_head.weight"])
    sharded.load_state_dict(state)
    found["loaded"] = difference(sharded(**mine).logits, logits)
    dist.barrier()
    return found


def test_fully_shard_per_layer_on_top(pool):
    for found in pool.run(sharding_data):
        assert found["part"] < 0.3, found
        assert max(found["outputs"], found["gradients"], found["state"], found["loaded"]) < 1e-5, found
        assert found["moved"] > 1e-2
