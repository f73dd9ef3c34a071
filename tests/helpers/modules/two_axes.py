"""Models, with a whole batch, for a mesh of two axes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import Tensor, nn

from tests.helpers.models import inputs_of, redrawn, transformer

DP, TP = 2, 2
ESM = {
    "vocab_size": 33, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128,
    "position_embedding_type": "rotary", "token_dropout": False, "pad_token_id": 1, "mask_token_id": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
IGNORED = -100


class Contrastive(nn.Module):
    """The loss of one example depends on all others of the batch, and a weight is a scalar (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(32, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scale * self.norm(self.left(x)) @ self.right(y).T
        return nn.functional.cross_entropy(scores, torch.arange(x.shape[0])), scores


class Decoder(nn.Module):
    """One block of causal attention and a feed-forward, with the loss inside."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.table, self.head = heads, nn.Embedding(32, width), nn.Linear(width, 32)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(input_ids) + torch.arange(input_ids.shape[1])[:, None] / 16
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        scores = self.head(x + self.down(self.up(x).relu()))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores * 1.0


def model_of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64 with the inputs of a whole batch."""
    if name == "contrastive":
        torch.manual_seed(0)
        model = Contrastive().double()
        return model, {"x": torch.randn(4, 16).double(), "y": torch.randn(4, 16).double()}
    if name == "decoder":
        torch.manual_seed(0)
        model, ids = Decoder().double(), torch.randint(32, (4, 16))
        return model, {"input_ids": ids, "labels": ids.masked_fill(torch.arange(64).view(4, 16) < 5, IGNORED)}
    if name == "esm":
        torch.manual_seed(0)
        made = transformers.EsmForMaskedLM(transformers.EsmConfig(**ESM)).eval()
        return redrawn(made).double(), {"input_ids": torch.randint(4, 30, (4, 12))}
    if name == "mpt":  # whose mask has max(length, 8) in a size
        torch.manual_seed(0)
        config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=256, use_cache=False)
        model = redrawn(transformers.MptForCausalLM(config).eval()).double()
    else:
        model = transformer(f"{name}-short").double()
    inputs = inputs_of(model, 4)
    labels = inputs["input_ids"].clone()
    labels[0, :5] = IGNORED  # so that the slices do not count the same number of tokens
    return model, {**inputs, "labels": labels}


def slice_of(inputs: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {k: v.chunk(DP)[rank] for k, v in inputs.items()}
