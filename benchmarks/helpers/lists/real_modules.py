"""Modules as users write them, for the configurations that no installed library has."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.esm import modeling_esmfold
from transformers.models.esm.configuration_esm import TrunkConfig

# Rows of the tables of the Criteo Terabyte data set, as MLPerf's DLRM has them with at most 40 million rows each.
CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip


class DLRM(nn.Module):
    """Sums of table rows beside a network of dense features, and a network of their products (Naumov et al. 2019).

    Args:
        rows: of each table. width: of what is looked up. dense: features beside.
        crosses: layers that cross all features (DCNv2, Wang et al. 2021), of weights of this `rank`; 0: products of
            pairs.
    """

    def __init__(
        self, rows: tuple[int, ...] = CRITEO, width: int = 128, dense: int = 13, crosses: int = 0, rank: int = 512
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(n, width, mode="sum") for n in rows])
        self.bottom = _layers(dense, 512, 256, width)
        features = width * (len(rows) + 1)
        cross = nn.Linear(features, rank, bias=False), nn.Linear(rank, features)
        self.crosses = nn.ModuleList([deepcopy(nn.Sequential(*cross)) for _ in range(crosses)])
        products = width + len(rows) * (len(rows) + 1) // 2
        self.top = _layers(features if crosses else products, 1024, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """A score for every example.

        Args:
            dense: features, [examples, dense]. ids: rows of each table, [tables, examples, rows in a bag].
        """
        first = self.bottom(dense)
        looked = [table(rows) for table, rows in zip(self.tables, ids.unbind(0), strict=True)]
        each = torch.stack([first, *looked], 1)
        if self.crosses:
            x = all_ = each.flatten(1)
            for cross in self.crosses:
                x = all_ * cross(x) + x
            return self.top(x).squeeze(-1)
        products = each @ each.transpose(1, 2)
        rows, columns = torch.tril_indices(each.shape[1], each.shape[1], -1, device=dense.device)
        return self.top(torch.cat([first, products[:, rows, columns]], -1)).squeeze(-1)


def _layers(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*layers)


class Triangle(nn.Module):
    """Products of the edges of triangles, outgoing or incoming (Jumper et al. 2021)."""

    def __init__(self, width: int, outgoing: bool) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.edges, self.gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.gate, self.out, self.outgoing = nn.Linear(width, width), nn.Linear(width, width), outgoing

    def forward(self, pairs: Tensor) -> Tensor:
        """What each pair gets, [examples, residues, residues, width]."""
        x = self.norm(pairs)
        a, b = (self.edges(x) * self.gates(x).sigmoid()).chunk(2, -1)
        y = torch.einsum("bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc", a, b)
        return self.out(self.last(y)) * self.gate(x).sigmoid()


class TriangleAttention(nn.Module):
    """Attention along rows (or columns) of pairs, with a bias from the pairs themselves."""

    def __init__(self, width: int, heads: int, columns: bool) -> None:
        super().__init__()
        self.heads, self.columns, self.norm = heads, columns, nn.LayerNorm(width)
        self.qkv, self.bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        """What each pair gets, [examples, residues, residues, width]."""
        x = self.norm(pairs.transpose(1, 2) if self.columns else pairs)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(2, 3) for t in self.qkv(x).chunk(3, -1))
        bias = self.bias(x).permute(0, 3, 1, 2).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(2, 3).flatten(-2)
        y = self.out(y * self.gate(x).sigmoid())
        return y.transpose(1, 2) if self.columns else y


class Pairs(nn.Module):
    """Blocks over pairs of residues: triangle products, triangle attention and a feed-forward network.

    Args:
        blocks: how many. width: of a pair. heads: of the attention. features: of a pair, as it is given.
    """

    def __init__(self, blocks: int, width: int, heads: int, features: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList([self._block(width, heads) for _ in range(blocks)])

    @staticmethod
    def _block(width: int, heads: int) -> nn.ModuleList:
        forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        products = Triangle(width, True), Triangle(width, False)
        return nn.ModuleList(
            [*products, TriangleAttention(width, heads, False), TriangleAttention(width, heads, True), forward]
        )

    def forward(self, pairs: Tensor) -> Tensor:
        """The pairs after all blocks, [examples, residues, residues, width]; before, their last size is `features`."""
        pairs = self.embed(pairs)
        for block in self.blocks:
            for part in block:  # type: ignore[attr-defined]
                pairs = pairs + part(pairs)
        return pairs


class GPSLayer(nn.Module):
    """Messages along edges (gated graph convolution) beside attention over all nodes (Rampasek et al. 2022)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        names = ("here", "there", "edge", "message", "own")
        self.parts = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.forward_ = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes and edges after the layer.

        Args:
            x: nodes, [graphs, nodes, width]. edges: [graphs, edges, width].
            source, target: nodes of each edge, [graphs, edges].
        """
        p, wide = self.parts, x.shape[-1]
        start, end = (i.unsqueeze(-1).expand(-1, -1, wide) for i in (source, target))
        gate = p["here"](x).gather(1, end) + p["there"](x).gather(1, start) + p["edge"](edges)
        message = gate.sigmoid() * p["message"](x).gather(1, start)
        local = p["own"](x) + torch.zeros_like(x).scatter_add(1, end, message)
        local = self.norms[0](x + local.relu())
        everywhere = self.norms[1](x + self.attention(x, x, x, need_weights=False)[0])
        y = local + everywhere
        return self.norms[2](y + self.forward_(y)), edges + gate.relu()


class GraphGPS(nn.Module):
    """Layers over graphs of equal numbers of nodes and edges.

    Args:
        layers: how many. width: of nodes and edges. heads: of the attention.
    """

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GPSLayer(width, heads) for _ in range(layers)])

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Nodes after all layers; the arguments are those of a layer."""
        for layer in self.layers:
            x, edges = layer(x, edges, source, target)
        return x


class Trunk(nn.Module):
    """Blocks of ESMFold over a sequence and its pairs of residues.

    Args:
        blocks: how many.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        kind, config = modeling_esmfold.EsmFoldTriangularSelfAttentionBlock, TrunkConfig(num_blocks=blocks)
        self.blocks = nn.ModuleList([kind(config) for _ in range(blocks)])

    def forward(self, sequence: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Both after all blocks, [examples, residues, width] and [examples, residues, residues, width]."""
        for block in self.blocks:
            sequence, pairs = block(sequence, pairs)
        return sequence, pairs


class Graphormer(nn.Module):
    """A transformer over nodes, biased by distances, with nodes' degrees in what it reads (Ying et al. 2021).

    Args:
        layers: how many. width: of nodes. heads: of the attention. distances, degrees: how many are told apart.
    """

    def __init__(self, layers: int, width: int, heads: int, distances: int = 20, degrees: int = 64) -> None:
        super().__init__()
        self.distances, self.degrees = nn.Embedding(distances, heads), nn.Embedding(degrees, width)
        kind = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([deepcopy(kind) for _ in range(layers)])

    def forward(self, nodes: Tensor, distances: Tensor, degrees: Tensor) -> Tensor:
        """Nodes after all layers.

        Args:
            nodes: [graphs, nodes, width]. distances: [graphs, nodes, nodes]. degrees: [graphs, nodes].
        """
        bias = self.distances(distances).permute(0, 3, 1, 2).flatten(0, 1)
        nodes = nodes + self.degrees(degrees)
        for layer in self.layers:
            nodes = layer(nodes, src_mask=bias)
        return nodes


class Towers(nn.Module):
    """Two towers for retrieval: scores of every query with every passage of a batch.

    Args:
        config: of each tower.
    """

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.query, self.passage = (transformers.BertModel(config, add_pooling_layer=False) for _ in range(2))

    def forward(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Scores, [queries, passages].

        Args:
            queries, passages: ids, [examples, length].
        """
        q, p = (
            tower(ids).last_hidden_state.mean(1) for tower, ids in ((self.query, queries), (self.passage, passages))
        )
        return F.normalize(q, dim=-1) @ F.normalize(p, dim=-1).T
