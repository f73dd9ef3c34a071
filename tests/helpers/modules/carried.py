"""A module that takes its cache as tensors and returns it, as nobody's library wrote it; and what a cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.ir.carried import describe

WIDTH, HEADS, KV, SIZE = 16, 4, 2, 4
CARRIED = {1: "past_k", 2: "past_v"}


class Attention(nn.Module):
    """Attention of new tokens over all; without a past when that is left out."""

    def __init__(self, kv: int = KV) -> None:
        super().__init__()
        self.kv = kv
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * SIZE), nn.Linear(WIDTH, kv * SIZE)

    def forward(
        self, x: Tensor, past_k: Tensor | None = None, past_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past_k is not None and past_v is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        at = torch.arange(k.shape[2])
        seen = at <= at[k.shape[2] - x.shape[1] :, None]
        y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)), k, v


class Nested(nn.Module):
    """The same with the cache as a list in, and a dictionary of tuples out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, past: list[Tensor]) -> dict[str, object]:
        y, k, v = self.inner(x, *past)
        return {"y": y, "cache": (k, v)}


def past(length: int, kv: int = KV, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Keys and values of so many tokens."""
    draw = torch.Generator().manual_seed(length)
    k, v = (torch.randn(batch, kv, length, SIZE, generator=draw) for _ in range(2))
    return k, v


def tokens(length: int, batch: int = 2) -> Tensor:
    """So many new tokens."""
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length + 1))


def kept_bytes(model: Any, inputs: Mapping[str, Any], count: int) -> int:
    """Bytes of the tensors in the cache with which `generate()` ends, after so many tokens; 0 where there is none.

    Args:
        model: unsharded, or a sharded module, whose object holds this rank's part. inputs: the prompts.
    """
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "num_beams": 1, "use_cache": True}
    with torch.no_grad():
        outputs = model.generate(**given, **asked, return_dict_in_generate=True)
    names = ("past_key_values", "cache_params", "state")
    held = next((x for x in (getattr(outputs, name, None) for name in names) if x is not None), ())
    tensors = [x for x in describe(held, "cache").tensors if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)
