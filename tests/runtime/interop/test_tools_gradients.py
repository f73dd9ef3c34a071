"""What people do to gradients of a sharded module: accumulate, freeze, hook, adapt (LoRA), differentiate twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp import compat
from autotp.comm import collectives
from autotp.errors import StateError
from tests.helpers.beside import EXACT, backward, pair, states_differ, whole
from tests.helpers.compare import difference, gradients_differ, mesh_of
from tests.helpers.models import inputs_of, redrawn
from tests.helpers.modules.stacked import Block
from tests.helpers.modules.trained import model_of

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
    shape: dict[str, Any] = {"n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": 64}
    config = transformers.GPT2Config(**shape, use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0)
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
        spread(**mine).logits.sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):  # they would not be summed over dp
        torch.autograd.grad(spread(**mine).logits.sum(), list(spread.parameters()))
    return [*said, str(error.value)]


def test_what_is_not_supported_is_refused_with_a_sentence(pool):
    for one, two, three in pool.run(refusing):
        assert "dp=" in one and one == two
        assert "create_graph=True" in three and "over tp alone" in three


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
