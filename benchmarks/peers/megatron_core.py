"""Megatron-Core's GPTModel with the weights of the benchmarks' Llama, on ranks of a CPU.

Its model parallelism asks two things of CUDA, for which something stands in: the current device, and the tracker of
random numbers, which nothing without dropout draws from.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.helpers.llama.megatron import Shape

PACKAGE = "megatron.core"


def _stand_in() -> None:
    """Put the CPU, and a tracker that does nothing, where CUDA's are asked for."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    random: Any = importlib.import_module(f"{PACKAGE}.tensor_parallel.random")
    tracker = SimpleNamespace(fork=lambda *_: contextlib.nullcontext(), is_initialized=lambda: True)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    whole: Any = importlib.import_module(f"{PACKAGE}.tensor_parallel")
    random.get_cuda_rng_tracker = whole.get_cuda_rng_tracker = lambda *_, **__: tracker
    random.initialize_rng_tracker = lambda *_, **__: None


class Wrapped(nn.Module):
    """GPTModel called with ids alone; whole logits [batch, length, vocabulary] on every rank."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, length] -> logits."""
        length = ids.shape[1]
        places = torch.arange(length).expand_as(ids)
        later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return self.inner(ids, places, later)


def gpt_model(model: nn.Module, shape: Shape, sequence: bool) -> nn.Module:
    """Return Megatron-Core's model over all ranks.

    Args:
        model: the whole Llama. shape: its sizes. sequence: sequence parallelism.
    """
    config_of: Any = importlib.import_module(f"{PACKAGE}.transformer.transformer_config").TransformerConfig
    made: Any = importlib.import_module(f"{PACKAGE}.models.gpt").GPTModel
    specs: Any = importlib.import_module(f"{PACKAGE}.models.gpt.gpt_layer_specs")
    state: Any = importlib.import_module(f"{PACKAGE}.parallel_state")
    _stand_in()
    tp = dist.get_world_size()
    if not state.is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = config_of(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads, ffn_hidden_size=shape.wide, use_cpu_initialization=True,
        normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp,
        sequence_parallel=sequence, bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    inner = made(
        config, specs.get_gpt_layer_local_spec(normalization="RMSNorm"), shape.vocabulary, 4096, parallel_output=False,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, rotary_base=10000,
    )  # fmt: skip
    with torch.no_grad():
        own = dict(inner.named_parameters())
        for name, part in parts(model.state_dict(), shape, tp, dist.get_rank()):
            own.pop(name).copy_(part)
    if own:
        raise RuntimeError(f"no weights for {sorted(own)}")
    return Wrapped(inner)


def parts(whole: Mapping[str, Tensor], shape: Shape, tp: int, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each of its parameters' names with this rank's part: q, k and v lie by groups, gate before up."""
    yield "embedding.word_embeddings.weight", whole["model.embed_tokens.weight"].chunk(tp)[rank]
    yield "output_layer.weight", whole["lm_head.weight"].chunk(tp)[rank]
    yield "decoder.final_layernorm.weight", whole["model.norm.weight"]
    for i in range(shape.layers):
        mine, theirs = f"model.layers.{i}", f"decoder.layers.{i}"
        q, k, v = (whole[f"{mine}.self_attn.{x}_proj.weight"].unflatten(0, (shape.kv_heads, -1)) for x in "qkv")
        yield f"{theirs}.self_attention.linear_qkv.weight", torch.cat((q, k, v), 1).chunk(tp)[rank].flatten(0, 1)
        gate, up = (whole[f"{mine}.mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up"))
        yield f"{theirs}.mlp.linear_fc1.weight", torch.cat((gate, up))
        yield f"{theirs}.self_attention.linear_proj.weight", whole[f"{mine}.self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        yield f"{theirs}.mlp.linear_fc2.weight", whole[f"{mine}.mlp.down_proj.weight"].chunk(tp, 1)[rank]
        yield f"{theirs}.input_layernorm.weight", whole[f"{mine}.input_layernorm.weight"]
        yield f"{theirs}.pre_mlp_layernorm.weight", whole[f"{mine}.post_attention_layernorm.weight"]
