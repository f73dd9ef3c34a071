"""A Llama in plain PyTorch, and the same written by hand for tensor parallelism as Megatron does it.

Both are one piece of code: `Llama(shape)` is the untouched model, `Llama(shape, Plain(...))` and `Llama(shape,
Sequence(...))` hold one rank's slices as plain parameters and communicate by f, f*, g, g* (`.ways`)
around column- and row-parallel matrices, a vocabulary-parallel embedding and head, with one conversion for q, k, v and
one for gate, up. Parameters have transformers' names, so that all speak one state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .ways import Whole


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int = 1024
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    wide: int = 2816
    vocabulary: int = 32000

    @property
    def width(self) -> int:
        """Of a head."""
        return self.hidden // self.heads


class Norm(nn.Module):
    """RMSNorm in the operators of transformers' Llama."""

    def __init__(self, size: int, way: Whole) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.ones(size)), way

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same."""
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.way.norm(self.weight) * scaled


class Table(nn.Embedding):
    """An embedding, of which a rank has its rows."""

    def __init__(self, rows: int, size: int, way: Whole) -> None:
        super().__init__(rows // way.tp, size)
        self.way, self.own = way, rows // way.tp

    def forward(self, input: Tensor) -> Tensor:
        """Ids [batch, length] -> [batch, length, hidden]."""
        ids = input
        if self.way.tp == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.way.rank * self.own
        others = (local < 0) | (local >= self.own)
        found = F.embedding(local.masked_fill(others, 0), self.weight)
        return self.way.leave(found.masked_fill(others.unsqueeze(-1), 0.0))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [batch, heads, length, width]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape, way: Whole) -> None:
        super().__init__()
        self.way, self.width = way, shape.width
        wide, narrow = shape.hidden // way.tp, shape.kv_heads * shape.width // way.tp
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same."""
        x = self.way.enter(x)
        q, k, v = (
            f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.way.leave(self.o_proj(y.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, way: Whole) -> None:
        super().__init__()
        self.way, wide = way, shape.wide // way.tp
        self.gate_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.up_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same."""
        x = self.way.enter(x)
        return self.way.leave(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, shape: Shape, way: Whole) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, way), FeedForward(shape, way)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden, way), Norm(shape.hidden, way)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def frequencies(shape: Shape) -> Tensor:
    """Of the rotary positions, on the CPU even where the default device is another: [width / 2]."""
    return 10000.0 ** -(torch.arange(0, shape.width, 2, device="cpu").float() / shape.width)


class Decoder(nn.Module):
    """All but the head."""

    frequencies: Tensor

    def __init__(self, shape: Shape, way: Whole) -> None:
        super().__init__()
        self.embed_tokens = Table(shape.vocabulary, shape.hidden, way)
        self.layers = nn.ModuleList(Layer(shape, way) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, way)
        self.register_buffer("frequencies", frequencies(shape), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, hidden], a slice of the length under sequence parallelism."""
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin, x = angles.cos(), angles.sin(), self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """The whole model, or one rank's part of it."""

    def __init__(self, shape: Shape, way: Whole | None = None) -> None:
        super().__init__()
        self.way = way or Whole()
        self.model = Decoder(shape, self.way)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary // self.way.tp, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids [batch, length] -> logits [batch, length, vocabulary], whole on every rank."""
        return self.way.gather(self.lm_head(self.way.enter(self.model(input_ids))))


# ---- its weights ---------------------------------------------------------------------------------------------------

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")  # rows of the matrix
ROW = ("o_proj", "down_proj")


def split_dim(name: str) -> int | None:
    """The dimension of the parameter of this name that Megatron splits; None where it is whole."""
    layer = name.split(".")[-2]
    return 0 if layer in COLUMN else 1 if layer in ROW else None


def megatron_pins(shape: Shape) -> dict[str, Shard | Replicate]:
    """The same plan, as pins for `autotp.plan`."""
    with torch.device("meta"):
        names = [name for name, _ in Llama(shape).named_parameters()]
    return {name: Replicate() if (dim := split_dim(name)) is None else Shard(dim) for name in names}


def untouched(shape: Shape, seed: int = 0) -> Llama:
    """The model with weights that keep its activations near 1."""
    draw = torch.Generator().manual_seed(seed)
    model = Llama(shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * (p.shape[1] ** -0.5 if p.ndim == 2 else 0.1))
            if p.ndim == 1 or "embed_tokens" in name:
                p.copy_(p + 1 if p.ndim == 1 else p * p.shape[1] ** 0.5)
    return model


def by_hand(shape: Shape, way: Whole, state: Mapping[str, Tensor]) -> Llama:
    """One rank's hand-written model, with its slices of a whole state dict; DTensors lend their local tensors."""
    with torch.device("meta"):
        model = Llama(shape, way)
    for name in dict(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        whole, dim = state[name].detach(), split_dim(name)
        if isinstance(whole, DTensor):
            local = whole.to_local()
        else:
            own = whole if dim is None else whole.chunk(way.tp, dim)[way.rank]
            local = own.clone(memory_format=torch.contiguous_format)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(local))
    return model
