"""A small Llama in float64 with fewer heads of keys than of queries: trained and generating beside itself, sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from tests.helpers.beside import states_differ
from tests.helpers.compare import difference, gradients_differ

EXACT = 1e-9


def grouped(kv: int = 2, heads: int = 4, width: int = 16) -> Any:
    """Two layers in float64, with weights large enough that tokens change."""
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": width, "intermediate_size": 24, "num_hidden_layers": 2}
    counts: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **counts, max_position_embeddings=128, pad_token_id=0, eos_token_id=None)
    model: Any = LlamaForCausalLM(config).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def padded() -> dict[str, Tensor]:
    """Two prompts, the first padded on the left."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 30, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    ids[0, :2] = mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def step(sharded: Any, model: Any, batch: dict[str, Tensor], fused: bool = False) -> tuple[float, float, float, float]:
    """Largest differences of outputs, gradients, their norm, and weights after two steps; `fused`: of the optimizer."""
    gaps: list[float] = []
    for m in (sharded, model):
        m.zero_grad()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused) for m in (sharded, model)]
    for _ in range(2):
        outputs = [m(**batch).logits for m in (sharded, model)]
        for y in outputs:
            y.square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (sharded, model)]
        gaps = [difference(outputs[0], outputs[1]), gradients_differ(sharded, model)]
        gaps.append(abs(float(norms[0]) - float(norms[1])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gaps[0], gaps[1], gaps[2], states_differ(sharded, model)


@torch.no_grad()
def generated(sharded: Any, model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    options = {"max_new_tokens": 6, "return_dict_in_generate": True}
    found: dict[str, Any] = {}
    for name, more in {"greedy": {}, "beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}.items():
        got, wanted = (m.generate(**batch, **options, **more) for m in (sharded, model))
        found[name] = bool((got.sequences == wanted.sequences).all())
        found[f"{name} heads"] = got.past_key_values.layers[0].keys.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = sharded.generate(**batch, **options, past_key_values=cache)
    found["own"] = bool((got.sequences == model.generate(**batch, **options).sequences).all())
    return found
