"""Many devices as pp x dp x cp x tp: which meshes there are, and what each axis sends.

Axes are placed from the inside out in the order tp, cp, dp, pp: ranks of a tp group are neighbours, those of a cp group
have the stride tp, of a dp group tp x cp, and the stages of a pipeline tp x cp x dp. That decides which groups stay
inside a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotp.cost.machines.cluster import Cluster
from autotp.text import divisors

from .collective_costs import call_seconds, collective_bytes

KEEPS = ("all", "slices", "inputs")


@dataclass(frozen=True)
class Mesh:
    """A way to use devices.

    Attributes:
        pp, dp, cp, tp: ranks of each axis.
        batch: examples of a micro-batch; `microbatches`: of one dp rank in a step.
        chunks: stages of each rank of the pipeline: 1 is the 1F1B schedule, more the interleaved one.
        fully_shard: weights, their gradients and optimizer states are split over dp and cp.
        ep: ranks of dp, or groups of neighbours among them, over which experts are distributed.
        keep: what a rank keeps for the backward: "all" that autograd does, "slices" of what is gathered over tp its
            own slice, "inputs" of each block its inputs, and the block is computed again.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    batch: int = 1
    microbatches: int = 1
    chunks: int = 1
    fully_shard: bool = False
    keep: str = "all"
    ep: int = 1

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """pp, dp, cp and tp."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def inner(self) -> tuple[int, int, int]:
        """tp, cp and ep, which decide a plan."""
        return self.tp, self.cp, self.ep

    @property
    def devices(self) -> int:
        return math.prod(self.degrees)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: over them gradients are summed."""
        return self.dp * self.cp

    @property
    def copies(self) -> int:
        """Ranks that compute with the same experts, of which each holds a part."""
        return self.dp // self.ep if self.ep > 1 else 1

    def stride(self, axis: str) -> int:
        """Return the distance between the ranks of a group of this axis; "weights": those of `replicas`."""
        inner = self.tp * self.cp
        outer = {"dp": inner, "ep": inner * self.copies, "pp": inner * self.dp}
        return {"tp": 1, "cp": self.tp, "weights": self.tp, **outer}[axis]

    def spans(self, axis: str, cluster: Cluster) -> bool:
        """Return whether a group of this axis leaves the node."""
        ranks = self.replicas if axis == "weights" else getattr(self, axis)
        return cluster.spans_nodes(ranks, self.stride(axis))


def factorisations(devices: int, inner: Iterable[tuple[int, int, int]], most: int) -> Iterator[Mesh]:
    """Every pp x dp x cp x tp that uses all devices.

    Args:
        devices: how many there are. inner: degrees of tp, cp and ep to choose from.
        most: stages that a pipeline can have.
    """
    for tp, cp, ep in inner:
        rest, remainder = divmod(devices, tp * cp * ep)
        if not remainder:
            yield from (Mesh(pp, ep * (rest // pp), cp, tp, ep=ep) for pp in divisors(rest) if pp <= most)


def variants(mesh: Mesh, example: int, examples: int, most: int, sizes: Sequence[int]) -> Iterator[Mesh]:
    """The mesh with every micro-batch and schedule that makes a step of so many examples.

    Args:
        mesh: its degrees. example: examples of a micro-batch at least. examples: of a step over all devices.
        most: stages in all. sizes: by which a micro-batch may be larger.
    """
    for size in sizes:
        batch = size * example
        count, rest = divmod(examples, mesh.dp * batch)
        if rest or not count:
            continue
        for chunks in (1, 2, 3, 4, 6, 8):
            loops = chunks == 1 or (mesh.pp > 1 and count % mesh.pp == 0)
            if loops and chunks * mesh.pp <= most:
                yield replace(mesh, batch=batch, microbatches=count, chunks=chunks)


def bubble(pp: int, chunks: int, microbatches: int) -> float:
    """Seconds that a rank of a pipeline stands idle in a step, over those that it works.

    (pp - 1) / (chunks x microbatches): of 1F1B and GPipe, and interleaved where chunks > 1 (Narayanan et al. 2021).

    Args:
        pp: ranks. chunks: stages of each. microbatches: in a step.
    """
    return (pp - 1) / (chunks * microbatches)


class Sends(NamedTuple):
    """Seconds and bytes of a rank."""

    seconds: float = 0.0
    bytes: float = 0.0

    def plus(self, other: Sends) -> Sends:
        """Both, one after the other."""
        return Sends(self.seconds + other.seconds, self.bytes + other.bytes)


def collective_sends(primitive: str, nbytes: float, n: int, cluster: Cluster, stride: int) -> Sends:
    """A collective: its arguments are those of `call_seconds`."""
    return Sends(call_seconds(primitive, nbytes, n, cluster, stride), collective_bytes(primitive, nbytes, n))


def weight_sends(mesh: Mesh, nbytes: float, cluster: Cluster, graded: float | None = None) -> Sends:
    """Return what the replicas of some weights send for them: split ones in every micro-batch, else once in a step.

    Whole: an all-reduce of the gradients. Split: weights are gathered for the forward and for the backward, and
    gradients reduce-scattered.

    Args:
        mesh: says where weights are split. nbytes: of the weights on a tp rank. cluster: the machines.
        graded: bytes of their gradients; by default as many. Without any the forward alone gathers weights.
    """
    grads = nbytes if graded is None else graded
    reduction = "reduce_scatter" if mesh.fully_shard else "all_reduce"
    calls = [(reduction, grads)] if grads else []
    if mesh.fully_shard:
        calls += [("all_gather", nbytes)] * (1 + bool(grads))
    total = Sends()
    for call, size in calls:
        total = total.plus(collective_sends(call, size, mesh.replicas, cluster, mesh.stride("weights")))
    return total


def boundary_sends(mesh: Mesh, nbytes: float, cluster: Cluster) -> Sends:
    """Return what a rank sends to its neighbours in the pipeline for a micro-batch, which nothing hides.

    It is a value forward and its gradient backward, for each of its chunks.

    Args:
        mesh: the degrees. nbytes: of the value on a rank. cluster: the machines.
    """
    if mesh.pp == 1:
        return Sends()
    latency, bandwidth, times = cluster.intra_latency, cluster.intra_bandwidth, 2 * mesh.chunks
    if mesh.spans("pp", cluster):
        latency, bandwidth = cluster.inter_latency, cluster.inter_bandwidth
    return Sends(times * (latency + nbytes / bandwidth), times * nbytes)
