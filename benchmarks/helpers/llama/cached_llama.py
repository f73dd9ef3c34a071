"""The Llama of `benchmarks.helpers.llama.megatron` for decoding, by hand: keys and values in a cache of fixed length.

Written as one writes it for speed: the cache is written in place, every step attends to all of it under a mask of
positions, keys and values are not repeated for their groups of heads, and the head reads the last position alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .megatron import Attention, Llama, turned
from .ways import Whole, gathered, reduced


class Inference(Whole):
    """Megatron's tensor parallelism without a backward."""

    def leave(self, x: Tensor) -> Tensor:
        return reduced(x, self.group)

    def gather(self, logits: Tensor) -> Tensor:
        return gathered(logits, 2, self.tp, self.group)


class CachedLlama(nn.Module):
    """A Llama, or one rank's part of it, with its cache of so many positions.

    Args:
        llama: gives the weights, and the way of its ranks.
        batch, length: of the cache, whose tensors are [layers, batch, own key/value heads, length, width of a head].
    """

    keys: Tensor
    values: Tensor

    def __init__(self, llama: Llama, batch: int, length: int) -> None:
        super().__init__()
        self.llama = llama
        first: Attention = llama.model.layers[0].self_attn  # type: ignore[assignment]
        shape = len(llama.model.layers), batch, first.k_proj.out_features // first.width, length, first.width
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Ids [batch, new] at these positions [new] -> logits of the last one [batch, 1, vocabulary]."""
        model, way = self.llama.model, self.llama.way
        angles = positions[:, None] * model.frequencies
        angles = torch.cat((angles, angles), -1)
        x = model.embed_tokens(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        seen = torch.arange(self.keys.shape[3], device=ids.device) <= positions[:, None]
        for layer, keys, values in zip(model.layers, self.keys, self.values, strict=True):
            y = layer.input_layernorm(x)  # type: ignore[operator]
            x = x + attend(layer.self_attn, y, cos, sin, keys, values, positions, seen)  # type: ignore[arg-type]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        return way.gather(self.llama.lm_head(way.enter(model.norm(x[:, -1:]))))


def attend(
    attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
    seen: Tensor,
) -> Tensor:  # fmt: skip
    """[batch, new, hidden] -> the same; keys and values of the new positions are written to the cache."""
    way, width = attention.way, attention.width
    x = way.enter(x)
    q = attention.q_proj(x).unflatten(-1, (-1, width)).transpose(1, 2)
    k = attention.k_proj(x).unflatten(-1, (-1, width)).transpose(1, 2)
    v = attention.v_proj(x).unflatten(-1, (-1, width)).transpose(1, 2)
    keys.index_copy_(2, positions, turned(k, cos, sin))
    values.index_copy_(2, positions, v)
    y = F.scaled_dot_product_attention(turned(q, cos, sin), keys, values, attn_mask=seen, enable_gqa=True)
    return way.leave(attention.o_proj(y.transpose(1, 2).flatten(2)))
