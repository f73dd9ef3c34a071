"""Who trains and decodes the benchmarks' Llama over the ranks, and what a user writes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.helpers.llama.decode_legs import Cached
from benchmarks.helpers.llama.decode_legs import ours as decoding
from benchmarks.helpers.llama.megatron import Shape
from benchmarks.helpers.llama.variants import dtensor, ours
from benchmarks.lists.hand_plans import theirs
from benchmarks.step_time import transformed

from . import deepspeed_autotp, megatron_core


@dataclass
class Leg:
    """A sharded model: logits [batch, length, vocabulary] of ids, its parameters, and a backward from a loss."""

    logits: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    backward: Callable[[Tensor], Any] = Tensor.backward


def of_module(module: nn.Module, compiled: bool = False) -> Leg:
    """Return the leg of what is called with ids, compiled by torch where that is asked for."""
    called: Any = torch.compile(module) if compiled else module

    def logits(ids: Tensor) -> Tensor:
        found = called(ids)
        return found if isinstance(found, Tensor) else found.logits

    return Leg(logits, list(module.parameters()))


def deepspeed(model: nn.Module, shape: Shape, compiled: bool) -> Leg:
    """Return DeepSpeed's, whose engine has its own backward."""
    engine = deepspeed_autotp.training(transformed(model, shape))
    if compiled:
        engine.compile()
    return Leg(lambda ids: engine(input_ids=ids).logits, list(engine.module.parameters()), engine.backward)


def accelerated(model: nn.Module, shape: Shape) -> Leg:
    """Return transformers' plan, prepared by accelerate."""
    from accelerate import Accelerator  # noqa: PLC0415  installed for the peers alone
    from accelerate.utils import ParallelismConfig  # noqa: PLC0415

    tp = dist.get_world_size()
    deepspeed_autotp.say_rank()
    prepared = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=tp)).prepare(
        theirs(transformed(model, shape), {}, tp)
    )
    return of_module(prepared)


AUTOTP, CORE, SPEED, STYLES, PLAN = "autotp", "Megatron-Core", "DeepSpeed AutoTP", "torch's styles", "tp_plan"
BY_ACCELERATE, GLOO = ", by accelerate", ", over gloo"
Train = Callable[[Any, Shape, Tensor], Leg]
TRAIN: dict[str, Train] = {
    AUTOTP: lambda m, s, x: of_module(ours(transformed(m, s), x, False)),
    CORE: lambda m, s, x: of_module(megatron_core.gpt_model(m, s, False)),
    SPEED: lambda m, s, x: deepspeed(m, s, False),
    STYLES: lambda m, s, x: of_module(dtensor(m, s, False)),
    PLAN: lambda m, s, x: of_module(theirs(transformed(m, s), {}, dist.get_world_size())),
    f"{PLAN}{BY_ACCELERATE}": lambda m, s, x: accelerated(m, s),
    f"{AUTOTP}, sequence-parallel": lambda m, s, x: of_module(ours(transformed(m, s), x, True)),
    f"{CORE}, sequence-parallel": lambda m, s, x: of_module(megatron_core.gpt_model(m, s, True)),
    f"{STYLES}, sequence-parallel": lambda m, s, x: of_module(dtensor(m, s, True)),
    f"{AUTOTP}, compiled": lambda m, s, x: of_module(ours(transformed(m, s), x, False, backend="inductor")),
    f"{CORE}, compiled": lambda m, s, x: of_module(megatron_core.gpt_model(m, s, False), True),
    f"{SPEED}, compiled": lambda m, s, x: deepspeed(m, s, True),
    f"{STYLES}, compiled": lambda m, s, x: of_module(dtensor(m, s, False), True),
    f"{PLAN}, compiled": lambda m, s, x: of_module(theirs(transformed(m, s), {}, dist.get_world_size()), True),
}
Decode = Callable[[Any, Shape, Tensor], Any]  # model, shape, prompt and a token -> the module that decodes
DECODE: dict[str, Decode] = {
    AUTOTP: lambda m, s, x: decoding(transformed(m, s).eval(), s, x, "eager"),
    SPEED: lambda m, s, x: deepspeed_autotp.inference(transformed(m, s).eval()).module,
    f"{SPEED}{GLOO}": lambda m, s, x: deepspeed_autotp.OverGloo(
        deepspeed_autotp.inference(transformed(m, s).eval()).module
    ),
    PLAN: lambda m, s, x: theirs(transformed(m, s).eval(), {}, dist.get_world_size()),
}


def base_of(name: str) -> str:
    """Return autotp's leg of the same kind: the one that a peer's times are held against."""
    kind = name.removeprefix(name.split(", ")[0])
    return AUTOTP if kind in {BY_ACCELERATE, GLOO} else AUTOTP + kind


def decoder(name: str, model: Any, shape: Shape, ids: Tensor) -> Cached:
    """Return the step that decodes the token after the prompt, with transformers' dynamic cache."""
    module = DECODE[name](model, shape, ids)
    return Cached(module, transformed(model, shape).config, ids, static=False)


# What a user writes to train transformers' Llama, beside the loop and `model = LlamaForCausalLM.from_pretrained(...)`.
WRITTEN = {
    AUTOTP: "sharded = autotp.compile(model, example_inputs=ids)",
    CORE: """
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
model_parallel_cuda_manual_seed(seed)
config = TransformerConfig(num_layers=..., hidden_size=..., num_attention_heads=..., num_query_groups=...,
    ffn_hidden_size=..., normalization="RMSNorm", layernorm_epsilon=..., gated_linear_unit=True, activation_func=F.silu,
    add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp)
model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size, length, parallel_output=False,
    position_embedding_type="rope", share_embeddings_and_output_weights=False, rotary_base=...)
for name, parameter in model.named_parameters():
    parameter.data.copy_(part_of(checkpoint, name, tp, rank))  # q, k, v by groups, gate before up: 15 lines more
""",
    SPEED: """
model = deepspeed.tp_model_init(model, tp_size=tp, dtype=dtype)
config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": tp}, "optimizer": ...}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
""",
    STYLES: """
mesh = init_device_mesh(device, (tp,))
plan = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
model = parallelize_module(model, mesh, plan)
""",
    PLAN: 'model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")',
}


def lines(text: str) -> int:
    """Return the number of lines that are not empty."""
    return sum(bool(line.strip()) for line in text.splitlines())


def chosen(table: Iterable[str], only: Iterable[str]) -> list[str]:
    """Return the legs of these peers, all where none are named, with autotp's of each kind."""
    names, only = list(table), set(only)
    peers = [name for name in names if not only or name.split(", ")[0] in only]
    return [name for name in names if name in peers or name in {base_of(peer) for peer in peers}]
