"""Overlap: communication beside products, where the cost model says that it saves time.

The backward all-reduce (f) or reduce-scatter (g) of an input's gradient runs under the products that make the weights'
gradients. An all-gather before products (g) and a reduce-scatter after one (g*) go in chunks, each under the product of
another chunk; `autotp.comm.overlapped` says how. How many chunks is chosen by `autotp.cost`; where none save enough the
calls stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from torch import fx

from autotp.cost import (
    CHOICES,
    best_chunks,
    call_seconds,
    hidden_seconds,
    node_flops,
    op_seconds,
    pipeline_seconds,
    size_hint,
    tensor_bytes,
)
from autotp.ir.specs import ShardSpec
from autotp.passes.base import Changes
from autotp.text import seconds as told

from .base import Optimisation, RankProgram, Setting
from .products import GatheredProducts, Product, ScatteredProduct, dealt, fuse, fuse_dealt, groups

TILES = 8  # of a product that a chunk must have rows for: with fewer it does not reach the machine's rate
LEAST = 10.0  # kernel launches that must be saved: what a function in Python takes more than torch's own backward


@dataclass(frozen=True)
class Chosen:
    """A number of chunks, and the seconds of a step that it is predicted to save."""

    chunks: int
    saved: float


@dataclass(frozen=True)
class Overlap(Optimisation):
    """Products and their conversions as one function each, in chunks where that is predicted to save time.

    Attributes:
        chunks: so many wherever rows are gathered or dealt; 0: by the cost model.
        least: kernel launches that a group must save to be put in.
    """

    name: ClassVar[str] = "overlap"
    chunks: int = 0
    least: float = LEAST

    def idle(self, program: RankProgram) -> str:
        """There is nothing to overlap in one process, and on CPUs nothing to gain."""
        setting = program.setting
        if setting.place.size == 1:
            return "nowhere: nothing is sent in one process"
        running = setting.place.group and setting.device.type == "cpu"
        return "nowhere: what sends between CPU processes takes the cores that compute" if running else ""

    def run(self, program: RankProgram) -> Changes:
        """Where it fired, in how many chunks, and what it is predicted to save."""
        graph, setting = program.graph, program.setting
        fired: Counter[str] = Counter()
        saved = left = 0.0
        model = _Model(setting)
        for found in chain(groups(graph), dealt(graph)):  # each is found in what the one before has left
            chosen = (
                model.dealing(found, self.chunks)
                if isinstance(found, ScatteredProduct)
                else model.group(found, self.chunks)
            )
            if chosen.saved <= self.least * setting.cluster.launch_overhead:
                fired["left"] += 1
                left += chosen.saved
                continue
            least = model.rows(found.conversion) // chosen.chunks // 2  # a call of much fewer rows goes in one piece
            if isinstance(found, ScatteredProduct):
                done = fuse_dealt(found, chosen.chunks, least)
            else:
                done = fuse(found, chosen.chunks, least=least)
            fired[_what(found, chosen.chunks) if done is not None else "made too late"] += 1
            saved += chosen.saved if done is not None else 0.0
        graph.eliminate_dead_code()
        done = sum(n for what, n in fired.items() if what not in ("left", "made too late"))
        return Changes(done, _told(fired, saved, left))


def _what(found: ScatteredProduct | GatheredProducts, chunks: int) -> str:
    if isinstance(found, ScatteredProduct):
        return f"products with their g* in {chunks} chunks"
    if chunks > 1:
        return f"g with its products in {chunks} chunks"
    return f"{'g' if found.gathers else 'f'} with its products, sent under the weights' gradients"


def _told(fired: Counter[str], saved: float, left: float) -> str:
    small, late = fired.pop("left", 0), fired.pop("made too late", 0)
    parts = [f"{n} {what}" for what, n in sorted(fired.items())]
    text = f"{', '.join(parts)}: {told(saved)} of a step by the cost model" if parts else "nowhere"
    rest = [f"{small} too small to gain ({told(left)} in all)"] if small else []
    rest += [f"{late} with weights that are made too late"] if late else []
    if not parts and not rest:
        return "nowhere: no product reads or makes what is converted alone"
    between = "; " if parts else ": "
    return f"{text}{between}{', '.join(rest)}" if rest else text


class _Model:
    """What the alternatives take, at the example inputs' sizes."""

    def __init__(self, setting: Setting) -> None:
        self.tp, self.cluster, self.training = setting.place.size, setting.cluster, setting.objective.training

    def group(self, found: GatheredProducts, forced: int) -> Chosen:
        """Of a conversion and its products: forward in chunks, backward under the weights' gradients."""
        size = tensor_bytes(found.conversion.meta["val"])
        backward = 0.0
        if self.training:
            sent = self.sends("reduce_scatter" if found.gathers else "all_reduce", size, 1)
            backward = hidden_seconds(sent, sum(self.product(p, 1) for p in found.products))
        if not found.gathers or not _rows(found.conversion.args[1], found.conversion):
            return Chosen(1, backward)

        def forward(n: int) -> float:
            arithmetic = sum(self.product(p, n) for p in found.products)
            made = sum(tensor_bytes(p.node.meta["val"]) / self.tp for p in found.products)
            kept = size if self.training else 0.0
            return pipeline_seconds(self.sends("all_gather", size, n), arithmetic, n) + self.copies(made + kept, n)

        chunks = forced or best_chunks(forward, self.choices(found.conversion))
        return Chosen(chunks, forward(1) - forward(chunks) + backward)

    def dealing(self, found: ScatteredProduct, forced: int) -> Chosen:
        """Of a product and its g*: in chunks, the reduce-scatter after it and the all-gather before its backward."""
        if not _rows(found.conversion.args[2], found.conversion):
            return Chosen(1, 0.0)
        size, read = tensor_bytes(found.conversion.meta["val"]), tensor_bytes(found.product.x.meta["val"]) / self.tp

        def step(n: int) -> float:
            arithmetic = self.product(found.product, n)
            there = pipeline_seconds(arithmetic, self.sends("reduce_scatter", size, n), n)
            there += self.copies(read + size / self.tp, n)
            if not self.training:
                return there
            back = pipeline_seconds(self.sends("all_gather", size, n), arithmetic, n)
            return there + back + self.copies(size + read, n)

        chunks = forced or best_chunks(step, self.choices(found.conversion))
        return Chosen(chunks, step(1) - step(chunks) if chunks > 1 else 0.0)

    def product(self, p: Product, chunks: int) -> float:
        """Seconds of one of so many chunks of a rank's part of the product; its gradients take as long."""
        out = p.node.meta["val"]
        sides = [tensor_bytes(t.meta["val"]) for t in (p.x, p.node, p.weight)]
        moved = (sides[0] + sides[1]) / chunks + sides[2]
        flops = node_flops(p.node) / self.tp / chunks
        return op_seconds(flops, moved / self.tp, str(out.dtype).removeprefix("torch."), self.cluster)

    def choices(self, conversion: fx.Node) -> tuple[int, ...]:
        """Numbers of chunks of which each has rows enough for a product."""
        most = self.rows(conversion) * self.tp // (TILES * self.cluster.matmul_tile)
        return tuple(n for n in CHOICES if n <= max(most, 1))

    def rows(self, conversion: fx.Node) -> int:
        """Rows of a rank's slice of a value, all dimensions but the last together, in the example."""
        return math.prod(map(size_hint, conversion.meta["val"].shape[:-1])) // self.tp

    def sends(self, primitive: str, size: float, chunks: int) -> float:
        return call_seconds(primitive, size / chunks, self.tp, self.cluster)

    def copies(self, size: float, chunks: int) -> float:
        """What chunks are joined in costs a reading and a writing."""
        return op_seconds(0.0, 2 * size, "float32", self.cluster) if chunks > 1 else 0.0


def _rows(spec: Any, node: fx.Node) -> bool:
    """Whether the layout deals out one run of rows, so that they can go in chunks."""
    return isinstance(spec, ShardSpec) and len(spec.segments) == 1 and spec.dim < node.meta["val"].ndim - 1
