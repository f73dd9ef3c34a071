"""A small Llama trained in float8 for a hundred steps: on one device, and on simulated ranks in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from autotp.capture.copies import with_histories
from autotp.capture.request import CaptureRequest
from autotp.cost import Cluster
from autotp.driver.compile import capture_model, plan_stages
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.proof.run import Simulated as Ranks
from autotp.proof.run import run, weights_of

STEPS, WIDTH, WORDS, RATE = 100, 32, 64, 0.3
# Where bytes count and calls do not: what is gathered is cast before.
FAST = {"intra_latency": 1e-12, "inter_latency": 1e-12, "collective_overhead": 1e-12, "launch_overhead": 1e-12}
SLOW = replace(Cluster.preset("local"), name="slow", intra_bandwidth=1e6, inter_bandwidth=1e6, **FAST)
SMALL: dict[str, Any] = {"smallest": 16}


class Block(nn.Module):
    """A layer of Llama: norms without means, attention by heads, a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, 2 * width, bias=False) for _ in range(3))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        q, k, v = (p(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Words(nn.Module):
    """Words, a block, and a head, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(WORDS, WIDTH), Block(WIDTH, 4), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)))


def words(dtype: torch.dtype, reorder: int = 0) -> nn.Module:
    """The model; with `reorder`, its hidden dimension in another order, so that every sum over it is reordered."""
    torch.manual_seed(0)
    model = Words().to(dtype)
    if not reorder:
        return model
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(reorder))
    wide = torch.randperm(2 * WIDTH, generator=torch.Generator().manual_seed(reorder))
    block = model.block
    with torch.no_grad():
        for p in (model.table, block.q, block.k, block.v, block.gate, block.up, model.head):
            p.weight.copy_(p.weight[:, order])
        block.o.weight.copy_(block.o.weight[order])
        block.down.weight.copy_(block.down.weight[order][:, wide])
        for p in (block.gate, block.up):
            p.weight.copy_(p.weight[wide])
    return model


def train(model: Any) -> list[float]:
    """The losses of the steps, whose words follow each other; other ones at every step."""
    optimizer, draw, losses = torch.optim.SGD(model.parameters(), lr=RATE), torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        ids = (torch.randint(WORDS, (2, 1), generator=draw) + torch.arange(9)) % WORDS
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).double().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model: nn.Module, recipe: str, example: Tensor | None = None, **more: Any) -> Any:
    example = torch.zeros(2, 8, dtype=torch.long) if example is None else example
    precision = {**SMALL, "recipe": recipe}
    return autotp.compile(model, example_inputs=example, precision=precision, check_capture=False, **more)


@cache
def one_device(recipe: str, dtype: torch.dtype, reorder: int = 0) -> list[float]:
    return train(sharded(words(dtype, reorder), recipe, tp=1))


class Simulated(nn.Module):
    """The program of `tp` ranks in one process, whose parameters are the ranks' parts; it gives rank 0's result."""

    def __init__(self, model: nn.Module, recipe: str, tp: int) -> None:
        super().__init__()
        request = CaptureRequest.read(precision={**SMALL, "recipe": recipe})
        ids = Inputs(torch.zeros(2, 8, dtype=torch.long))
        captured, notes = capture_model(model, ids, torch.device("cpu"), False, request)
        self.staged = plan_stages(
            captured, notes, Options.read(tp, Steering(sequence_parallel=True, cluster=SLOW)), "Words"
        )
        self.parts, self.places = {}, {}
        values = weights_of(with_histories(model, request.precision))
        for leaf, node in self._leaves():
            if not leaf.kind.passed:
                layout = self.staged.planned.decisions[leaf.node].outs[0].to_runtime()
                parts = [x.clone() for x in layout.split(values[leaf.name].detach(), tp)]
                trained = leaf.kind.trained
                self.parts[node] = [nn.Parameter(x) for x in parts] if trained else parts
                self.places |= {} if trained else {leaf.name: node}
        trained = [p for parts in self.parts.values() for p in parts if p.requires_grad]
        self.every, self.tp = nn.ParameterList(trained), tp

    def _leaves(self) -> list[Any]:
        nodes = [n for n in self.staged.sharded.graph.nodes if n.op == "placeholder"]
        return list(zip(self.staged.planned.program.leaves, nodes, strict=True))

    def forward(self, ids: Tensor) -> Tensor:
        given = {n: self.parts.get(n, [ids] * self.tp) for _, n in self._leaves()}
        ranks = run(self.staged.sharded, given, Ranks(self.tp)).outputs
        for position, name in self.staged.planned.program.mutations.items():
            self.parts[self.places[name]] = [outputs[position] for outputs in ranks]
        return Everywhere.apply(*(outputs[0] for outputs in ranks))


class Everywhere(torch.autograd.Function):
    """One value that all ranks have, whose gradient all of them are given."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.ranks = len(xs)
        assert all(torch.equal(x, xs[0]) for x in xs)
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (grad,) * ctx.ranks


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
