"""The smallest models that have the places where other systems had their bugs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .row import EXPERTS, HEADS, SIZE, WIDTH

VOCABULARY = 32


class Mlp(nn.Module):
    """A column-parallel and a row-parallel layer, with biases, under a layer that has a gradient."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up.weight.requires_grad_(not frozen)
        self.up.bias.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.first(x))))


class Transposed(Mlp):
    """The row-parallel result is transposed, and then whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1) * 1.5


class Largest(Mlp):
    """A maximum of what a row-parallel layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).amax(-1)


class Residual(Mlp):
    """A skip around the row-parallel layer, from before the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(torch.relu(self.up(x)))


class Masked(Mlp):
    """Dropout inside of a split, and after it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.up(self.first(x))), 0.5, self.training)
        return F.dropout(self.down(hidden), 0.5, self.training)


class Normed(nn.Module):
    """A norm, and a layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.up = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal attention; q and k with a norm of each head, or one over all heads; a gate; fewer kv heads."""

    def __init__(self, norm: str = "", gated: bool = False, kv: int = HEADS, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.gated, self.groups = norm, gated, kv
        self.q, self.o, self.gate = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.k, self.v = (nn.Linear(WIDTH, kv * SIZE, bias=False) for _ in range(2))
        self.requires_grad_(not frozen)
        self.q_norm = nn.Parameter(torch.rand(WIDTH if norm == "whole" else SIZE) + 0.5)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, SIZE).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        if self.norm == "whole":
            q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-3) * self.q_norm
        q, k, v = self.heads(q), self.heads(self.k(x)), self.heads(self.v(x))
        if self.norm == "heads":
            q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-3) * self.q_norm
        k, v = (t.repeat_interleave(HEADS // self.groups, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o(o * torch.sigmoid(self.gate(x)) if self.gated else o)


class Fused(nn.Module):
    """Attention and an MLP side by side, from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvm, self.o, self.m = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, m = self.qkvm(x).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], -1)
        q, k, v = (t.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(o) + self.m(torch.relu(m))


class Gated(nn.Module):
    """Gate and up from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Latent(nn.Module):
    """Multi-head latent attention's projections: one for the queries' and the keys' parts, of unequal widths."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 24, bias=False)
        self.q, self.kv = nn.Linear(16, WIDTH, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.both(x).split([16, 8], -1)
        return self.q(torch.tanh(q)) * 0.5 + self.kv(torch.tanh(kv))


class Experts(nn.Module):
    """A router and experts with biases, split within; scores before or after the second product."""

    def __init__(self, before: bool = True, aux: bool = False) -> None:
        super().__init__()
        self.before, self.aux = before, aux
        self.first, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        logits = self.router(x)
        scores = logits.softmax(-1)
        rows = x.reshape(1, -1, WIDTH).expand(EXPERTS, -1, -1)
        weights = scores.reshape(-1, EXPERTS).t().unsqueeze(-1)
        hidden = torch.relu(torch.bmm(rows, self.up))
        if self.before:
            y = torch.baddbmm(self.bias, hidden * weights, self.down).sum(0)
        else:
            y = (torch.baddbmm(self.bias, hidden, self.down) * weights).sum(0)
        y = y.view_as(x)
        return (y, logits.logsumexp(-1).square().mean()) if self.aux else y


class Balanced(nn.Module):
    """A router that writes to a buffer which of its experts had fewer tokens than the mean."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        counts = F.one_hot(logits.argmax(-1), EXPERTS).to(x.dtype).sum((0, 1))
        self.load.add_(torch.sign(counts.mean() - counts))
        return logits.softmax(-1)


class Sorted(nn.Module):
    """Experts on rows that are sorted by expert, one of which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        rows = self.first(x)
        ends = sizes.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(rows.bfloat16(), self.up.bfloat16(), offs=ends).float()
        return torch.relu(hidden) * torch.sigmoid(self.gate(rows))


class Tied(nn.Module):
    """One weight for the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.embed(ids))))


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.tanh(self.one(x)))


class Loss(nn.Module):
    """A head split by the vocabulary, and its loss in chunks."""

    def __init__(self, chunks: int = 2) -> None:
        super().__init__()
        self.chunks = chunks
        self.first, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Any:
        parts = self.first(x).flatten(0, 1).chunk(self.chunks)
        if self.chunks == 1:
            return self.head(parts[0])
        targets = [torch.arange(len(part)) % VOCABULARY for part in parts]
        return sum(F.cross_entropy(self.head(part), target) for part, target in zip(parts, targets, strict=True))


class Capacity(nn.Module):
    """A buffer of experts, capacity and width, the last two equal, of which a view is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x.view(EXPERTS, WIDTH, WIDTH))))


class Einsum(nn.Module):
    """Products written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("btw,wk->btk", self.first(x), self.up))
        return torch.einsum("btk,kw->btw", hidden, self.down)


class Viewed(nn.Module):
    """A split value whose elements are seen in other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).reshape(16, 6))


class Permuted(nn.Module):
    """A weight that is read permuted, and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(SIZE, HEADS))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * self.scale.permute(1, 0).flatten().tanh().sum()))


class Adapted(nn.Module):
    """A low-rank addition to a layer: its first factor is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x) + self.b(self.a(x))))
