"""Tiny random models: eleven families of the transformers library, and modules that no library wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autotp.driver.compile import apply_plan, capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.ir.program import Planned, Sharded
from autotp.plans.plan import Plan
from autotp.proof.run import Values

BATCH, LENGTH, HIDDEN, HEADS, VOCABULARY = 2, 16, 64, 8, 256
DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
NEOX = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
ENCODER = {k: v for k, v in NEOX.items() if k != "use_cache"}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 4, "hidden_size": HIDDEN, "intermediate_size": 128}
GPT = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "vocab_size": VOCABULARY, "use_cache": False}
T5 = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": HEADS, "vocab_size": VOCABULARY}
START = {"decoder_start_token_id": 2, "use_cache": False}
BIASED = {"attention_bias": True, "mlp_bias": True}

# name -> class of the transformers library (its config's name without "Config"), and the config's fields
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "llama-bias": ("LlamaForCausalLM", DECODER | BIASED),
    "llama-tied": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 8}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX | {"rotary_pct": 0.5}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4, "tie_word_embeddings": False}),
    "phi3": ("Phi3ForCausalLM", DECODER),
    "bert": ("BertForMaskedLM", ENCODER),
    "vit": ("ViTForImageClassification", IMAGE | {"num_hidden_layers": 2, "num_attention_heads": HEADS}),
    "t5": ("T5ForConditionalGeneration", T5 | START),
    "llama-uneven": ("LlamaForCausalLM", DECODER | {"vocab_size": 257, "intermediate_size": 129}),
    "llama-cache": ("LlamaForCausalLM", DECODER | {"use_cache": True}),
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 4, "experts_implementation": "eager"}),
}
TWELVE = list(FAMILIES)[:12]
DEPTHS = {"num_hidden_layers", "n_layer", "num_layers"}
# The same of one layer, by a name of its own.
SHORT = {name: (kind, fields | dict.fromkeys(DEPTHS & {*fields}, 1)) for name, (kind, fields) in FAMILIES.items()}
FAMILIES |= {f"{name}-short": family for name, family in SHORT.items()}


def transformer(name: str, **changed: Any) -> nn.Module:
    """A tiny model of a family in eval mode; `changed` are further fields of its config."""
    kind, fields = FAMILIES[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{**fields, **changed})
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return redrawn(model_class._from_config(config).eval())


def redrawn(model: nn.Module) -> nn.Module:
    """Weights of unit gain, and biases and norm scales off 0 and 1: else a doubled bias would hardly show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim > 1:
                p.copy_(noise / math.sqrt(p[0].numel()))
            else:
                p.add_(0.1 * noise)
    return model


def inputs_of(model: Any, batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Inputs by name: pixels for an image model, token ids otherwise."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
    ids = {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, length - 4), generator=generator)
    return ids


class Einsum(nn.Module):
    """An MLP written with einsum over bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(HIDDEN, 128)), nn.Parameter(torch.empty(128, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(128))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("...i,ij->...j", x, self.up) + self.bias
        return torch.einsum("...j,jk->...k", nn.functional.gelu(hidden), self.down)


class Attention(nn.Module):
    """An attention written with matmul and softmax, q, k and v from one fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores + torch.full((length, length), -torch.inf).triu(1), dim=-1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, HIDDEN))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one sequence."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Convolutions(nn.Module):
    """Two convolutions, a pool and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(torch.nn.functional.adaptive_avg_pool2d(hidden, 1).flatten(1))


def _layer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(HIDDEN, HEADS, 128, dropout=0.0, batch_first=batch_first)


TOKENS, PICTURES = (BATCH, LENGTH, HIDDEN), (BATCH, 3, 8, 8)
PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "einsum": (Einsum, TOKENS),
    "matmul-softmax": (Attention, TOKENS),
    "multihead": (lambda: SelfAttention(True), TOKENS),
    "multihead-length-first": (lambda: SelfAttention(False), TOKENS),
    "encoder-layer": (lambda: _layer(True), TOKENS),
    "encoder-layer-length-first": (lambda: _layer(False), TOKENS),
    "convolutions": (Convolutions, PICTURES),
}


@cache
def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model by name with its example inputs, made once: a test that changes either makes its own."""
    if name in FAMILIES:
        model = transformer(name)
        return model, Inputs(**inputs_of(model))
    make, shape = PLAIN[name]
    torch.manual_seed(0)
    return redrawn(make()).eval(), Inputs(torch.randn(shape).requires_grad_())


@cache
def captured(name: str) -> tuple[Capture, list[str]]:
    """A model's graph, captured once for all plans of it."""
    model, inputs = build(name)
    return capture_model(model, inputs, torch.device("cpu"))


@cache
def planned(name: str, tp: int, sequence_parallel: bool | None = None) -> tuple[Plan, Planned, Sharded]:
    """A model's plan and the program of its ranks."""
    capture, notes = captured(name)
    options = Options.read(tp, Steering(sequence_parallel=sequence_parallel))
    plan = solve_plan(capture, notes, options, name)
    return plan, *apply_plan(capture, plan, options)


def values(name: str, inputs: Inputs | None = None) -> Values:
    """The model's weights and the inputs as values of its graph."""
    model, own = build(name)
    return Values.of(captured(name)[0], model, inputs or own)
