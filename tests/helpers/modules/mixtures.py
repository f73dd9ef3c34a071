"""Small mixtures of experts in float64: transformers' own, and one written by hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import moe

from tests.helpers.models import redrawn

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "deepseek": ("DeepseekV3", LATENT),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "attn_implementation": "eager"}),
}
assert hasattr(moe, "grouped_mm_experts_forward")  # which enters the operator that `Mixture` calls


class Mixture(nn.Module):
    """Two experts a token, rows sorted by expert and added to their tokens; `bias` says what the router prefers."""

    def __init__(self, experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(32, width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 24) / 4)
        self.down = nn.Parameter(torch.randn(experts, 24, width) / 4)
        self.head = nn.Linear(width, 32)

    def experts(self) -> tuple[Tensor, Tensor]:
        """Weights of the two products."""
        return self.up, self.down

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(experts.float(), self.up.shape[0], 0, self.up.shape[0] - 1)
        ends = counts.cumsum(0).to(torch.int32)
        product, (up, down) = torch.ops.transformers.grouped_mm_fallback, self.experts()
        rows = product(product(tokens[order // 2], up, ends).relu(), down, ends)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        return self.head(x + torch.zeros_like(tokens).index_add(0, order // 2, rows).view_as(x))


def mixture(name: str, double: bool = True, **changes: Any) -> nn.Module:
    """A mixture by name, the same on every rank.

    Args:
        name: "by hand", or of `CONFIGS`. double: in float64. changes: of the config.
    """
    torch.manual_seed(0)
    if name == "by hand":
        model: nn.Module = Mixture(**changes)
    else:
        family, own = CONFIGS[name]
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **changes})
        config._experts_implementation = "eager" if double else "grouped_mm"  # torch's grouped products refuse float64
        model = redrawn(getattr(transformers, f"{family}ForCausalLM")(config))
    return model.double() if double else model


def tokens(seed: int = 0, batch: int = 4, length: int = 6) -> dict[str, Tensor]:
    """A whole batch."""
    return {"input_ids": torch.randint(4, 30, (batch, length), generator=torch.Generator().manual_seed(seed))}


def scores(out: Any) -> Tensor:
    """The logits of a model's output."""
    return out if isinstance(out, Tensor) else out.logits


def part(inputs: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's slice of a batch."""
    return {name: x.chunk(ranks)[rank] for name, x in inputs.items()}
