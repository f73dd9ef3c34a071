"""Modules that `torch.export` refuses until the capture helps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import autotp

WORDS, WIDTH = 10, 8
IDS = torch.tensor([[2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2]])
MORE = torch.randint(2, WORDS, (3, 9), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Words(nn.Module):
    """Embeds and projects; what lies between is each subclass's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)


class Net(nn.Module):
    """One linear layer; what is done with it is each subclass's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, WIDTH)


def same(model: nn.Module, inputs: Any, *calls: Any) -> Any:
    """The model sharded over one rank, after it answered like the model to these calls."""
    sharded: Any = autotp.compile(model, 1, example_inputs=inputs)
    for call in calls:
        assert torch.equal(sharded(call), model(call))
    return sharded


class Masked(Words):
    """Makes its own mask where none is given, but not while it is being compiled."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None and not torch.compiler.is_compiling():
            attention_mask = self.own(input_ids)
        return self.up(self.table(input_ids) * attention_mask[..., None])  # type: ignore[index]

    def own(self, ids: Tensor) -> Tensor:
        return torch.ones_like(ids)


class Experts(Net):
    """Three experts; each token has two of them."""

    def __init__(self, way: str | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=way)
        self.experts, self.router = nn.Parameter(torch.randn(3, WIDTH, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        if self.config._experts_implementation == "batched_mm":
            each = torch.einsum("ti,tkio->tko", x, self.experts[chosen])
            return (each * scores[..., None]).sum(1)
        return self.looped(x, scores, nn.functional.one_hot(chosen, 3).permute(2, 1, 0))

    def looped(self, x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            rank, token = torch.where(mask[int(expert.item())])
            if token.numel() == 0:
                continue
            weight = dict(self.named_parameters())["experts"][int(f"{expert[0]}")]
            out.index_add_(0, token, (x[token] @ weight) * scores[token, rank, None])
        return out


class Decides(Words):
    """Branches on the values of its inputs, and on a constant."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        padding = ids == 0
        y = self.up(self.table(ids)) * scale
        if torch.arange(4).sum() > 5:
            y = y + 1
        if not padding.any():
            return y
        return y.masked_fill(padding[..., None], 0.0)
