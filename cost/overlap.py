"""Seconds of communication beside arithmetic: a pipeline of two stages, of which one hides part of the other.

Of n equal chunks that pass two stages one after the other, the first chunk of the first stage and the last of the other
run alone, and between them the slower stage sets the pace. A chunk pays a whole collective's start and a whole
kernel's launch, so small products lose. That a collective takes processors and memory bandwidth from a product beside
it is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autotp.cost.machines.cluster import Cluster

from .collective_costs import call_seconds
from .compute import op_seconds

CHOICES = (1, 2, 4, 8)  # numbers of chunks


def pipeline_seconds(first: float, then: float, chunks: int) -> float:
    """Seconds of so many chunks through two stages.

    Args:
        first, then: seconds of one chunk in each stage.
        chunks: how many there are, at least 1.
    """
    return first + then + (chunks - 1) * max(first, then)


def hidden_seconds(communication: float, arithmetic: float) -> float:
    """Seconds that are saved where the two, otherwise one after the other, run beside each other."""
    return min(communication, arithmetic)


TILES = 8  # of a product that a chunk must have rows for: with fewer it does not reach the machine's rate
# Kernel launches that must be saved: what a function in Python takes more than torch's own backward.
LEAST_LAUNCHES = 10.0


class Product(NamedTuple):
    """A product by a matrix: bytes of its operand, result and weight, and its flops, all whole; its dtype's name."""

    operand_bytes: float
    result_bytes: float
    weight: float
    flops: float
    dtype: str


class Chunks(NamedTuple):
    """A number of chunks, and the seconds of a step that they are predicted to save."""

    number: int
    saved: float


@dataclass(frozen=True)
class OverlapModel:
    """Seconds of conversions beside the products of `tp` ranks, each of which has a part of every product.

    Attributes:
        tp: number of ranks. cluster: the machines. training: whether there is a backward.
    """

    tp: int
    cluster: Cluster
    training: bool

    def gathering(self, size: float, rows: int, products: Sequence[Product], forced: int = 0) -> Chunks:
        """Price an all-gather and the products that read it: forward, in chunks.

        Args:
            size: bytes of the gathered value. rows: that a rank has of it.
            products: that read it. forced: a number of chunks; 0 chooses.
        """
        result_bytes = sum(p.result_bytes for p in products) / self.tp
        gathered_bytes = size if self.training else 0.0

        def seconds(n: int) -> float:
            arithmetic = sum(self.product(p, n) for p in products)
            return pipeline_seconds(self.sends("all_gather", size, n), arithmetic, n) + self.copies(
                result_bytes + gathered_bytes, n
            )

        return self._best(seconds, rows, forced)

    def dealing(self, size: float, rows: int, product: Product, forced: int = 0) -> Chunks:
        """Price a product and the reduce-scatter after it: in chunks, forward, and the all-gather before its backward.

        Args:
            size: bytes of the product's result. rows: that a rank gets of it.
            product: the product. forced: a number of chunks; 0 chooses.
        """
        operand_bytes = product.operand_bytes / self.tp

        def seconds(n: int) -> float:
            arithmetic = self.product(product, n)
            forward = pipeline_seconds(arithmetic, self.sends("reduce_scatter", size, n), n) + self.copies(
                operand_bytes + size / self.tp, n
            )
            if not self.training:
                return forward
            backward = pipeline_seconds(self.sends("all_gather", size, n), arithmetic, n)
            return forward + backward + self.copies(size + operand_bytes, n)

        return self._best(seconds, rows, forced)

    def product(self, p: Product, chunks: int = 1) -> float:
        """Seconds of one of so many chunks of a rank's part of the product; its gradients take as long."""
        nbytes = (p.operand_bytes + p.result_bytes) / chunks + p.weight
        return op_seconds(p.flops / self.tp / chunks, nbytes / self.tp, p.dtype, self.cluster)

    def _best(self, seconds: Callable[[int], float], rows: int, forced: int) -> Chunks:
        """The number of chunks that takes least, of equal ones the smallest, where each has rows enough for a product;
        `seconds`: what a number of chunks takes in all."""
        most = rows * self.tp // (TILES * self.cluster.matmul_tile)
        chunks = forced or min((n for n in CHOICES if n <= max(most, 1)), key=lambda n: (seconds(n), n))
        return Chunks(chunks, seconds(1) - seconds(chunks))

    def sends(self, primitive: str, size: float, chunks: int = 1) -> float:
        """Seconds of one of so many chunks of a collective."""
        return call_seconds(primitive, size / chunks, self.tp, self.cluster)

    def copies(self, size: float, chunks: int) -> float:
        """Return the seconds to concatenate the chunks: one read and one write."""
        return op_seconds(0.0, 2 * size, "float32", self.cluster) if chunks > 1 else 0.0
