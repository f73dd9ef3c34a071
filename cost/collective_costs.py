"""Bytes and seconds of a collective: alpha-beta formulas of the algorithms that NCCL uses.

A step costs the link's latency (alpha) and bytes over its bandwidth (beta): Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005). Steps and links are counted as NCCL's own model
does (src/graph/tuning.cc). `D` is the bytes of the whole tensor; `n` ranks, of which each of `k` nodes holds `m`;
alpha, beta inside a node, alpha', beta' between nodes:

| algorithm | of | seconds |
| --- | --- | --- |
| ring | all_reduce | 2(n-1) alpha + 2(n-1)/n D/beta |
| ring | all_gather, reduce_scatter | (n-1) alpha + (n-1)/n D/beta |
| pairs | all_to_all | (n-1) alpha + (n-1)/n^2 D/beta; a node without a switch forwards: n/2 times the bytes |
| tree | all_reduce | 2((m-1) alpha + log2(k) alpha') + 2 D/beta: chains in the nodes, a tree between them |
| hierarchical | all_reduce | reduce_scatter of D in the node, all_reduce of D/m between nodes, all_gather in the node |
| hierarchical | all_gather, reduce_scatter | of D/m between nodes, of D in the node |
| hierarchical | all_to_all | of D/k in the node, of D/m between nodes |
| - | local | launch + D / memory bandwidth: a copy on each rank, D the bytes it reads and writes |

A group inside a node is priced as a ring (there the tree is a chain, which is never faster); one that spans nodes by
the cheapest of the three. A flat ring or tree over several nodes takes its latency from each link and its bandwidth
from the slowest; only the hierarchy uses every device's network adapter. Its stages do not overlap.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autotp.cost.machines.cluster import Cluster
from autotp.errors import InputError


class _Ring(NamedTuple):
    rounds: int  # of n - 1 steps each
    whole: bool  # whether a step moves 1/n of the whole tensor, or of a rank's own 1/n of it


_RINGS = {
    "all_reduce": _Ring(2, True),
    "all_gather": _Ring(1, True),
    "reduce_scatter": _Ring(1, True),
    "all_to_all": _Ring(1, False),
}
COLLECTIVES = tuple(_RINGS)
PRIMITIVES = (*COLLECTIVES, "local", "none")


class Link(NamedTuple):
    """One step between two ranks: latency in s, bandwidth in B/s, and whether ranks forward for each other."""

    latency: float
    bandwidth: float
    forwards: bool = False


class RankGroup(NamedTuple):
    """`n` ranks, `per_node` of them in each of `nodes` nodes (fewer in the last where `n` is not their product)."""

    n: int
    per_node: int
    nodes: int
    inner: Link
    outer: Link

    @classmethod
    def of(cls, n: int, cluster: Cluster, stride: int = 1) -> RankGroup:
        """The group of ranks 0, stride, 2 stride, ... of a cluster.

        Where a node has no switch, the `stride` groups whose ranks alternate share its ring's links.
        """
        per_node = cluster.per_node(n, stride)
        shared = 1 if cluster.switch else min(stride, cluster.devices_per_node)
        inner = Link(cluster.intra_latency, cluster.intra_bandwidth / shared, not cluster.switch)
        return cls(n, per_node, -(-n // per_node), inner, Link(cluster.inter_latency, cluster.inter_bandwidth))

    @property
    def slowest(self) -> float:
        """Bandwidth of the slowest link that a ring or a tree over the whole group takes."""
        links = [self.inner] * (self.per_node > 1) + [self.outer] * (self.nodes > 1)
        return min(link.bandwidth for link in links or [self.inner])


def collective_bytes(primitive: str, nbytes: float, n: int) -> float:
    """Bytes that each rank must send: what rings send. Trees send D per round, hierarchical all-to-alls forward.

    Args:
        primitive: one of all_reduce, all_gather, reduce_scatter, all_to_all, local, none.
        nbytes: bytes of the whole tensor.
        n: ranks of the group.

    Raises:
        InputError: an unknown primitive, negative or infinite bytes, or fewer than one rank.
    """
    _check(primitive, nbytes, n)
    ring = _RINGS.get(primitive)
    if ring is None:
        return 0.0
    return ring.rounds * (n - 1) / n * (nbytes if ring.whole else nbytes / n)


def collective_seconds(primitive: str, nbytes: float, n: int, cluster: Cluster, stride: int = 1) -> float:
    """Seconds that the collective takes by the cheapest of its algorithms, by the formulas at the head of this file.

    Args:
        primitive: one of all_reduce, all_gather, reduce_scatter, all_to_all, local, none.
        nbytes: bytes of the whole tensor; for `local` those that one rank reads and writes.
        n: ranks of the group.
        cluster: gives latencies and bandwidths, and how many ranks a node holds.
        stride: distance between the group's ranks: 1 for neighbours, on a mesh of (a, b) ranks b for the groups of
            the first axis. Their sibling groups run at the same time.

    Raises:
        InputError: an unknown primitive, negative or infinite bytes, fewer than one rank, or a stride below one.
    """
    _check(primitive, nbytes, n, stride)
    if primitive == "local":
        return cluster.launch_overhead + nbytes / cluster.memory_bandwidth
    if primitive == "none" or n == 1:
        return 0.0
    group = RankGroup.of(n, cluster, stride)
    ways = [flat_seconds(primitive, nbytes, group)]
    if group.nodes > 1:
        ways += [tree_seconds(nbytes, group)] if primitive == "all_reduce" else []
        ways += [hierarchical_seconds(primitive, nbytes, group)] if n == group.per_node * group.nodes else []
    return min(ways)


def call_seconds(primitive: str, nbytes: float, n: int, cluster: Cluster, stride: int = 1) -> float:
    """`collective_seconds`, and what a collective takes before its first step.

    Arguments and errors are those of `collective_seconds`.
    """
    seconds = collective_seconds(primitive, nbytes, n, cluster, stride)
    return seconds + cluster.collective_overhead if primitive in COLLECTIVES and n > 1 else seconds


def mostly_start(nbytes: float, n: int, cluster: Cluster) -> bool:
    """Return whether an all-reduce takes less than its start; arguments and errors as of `collective_seconds`."""
    start, whole = (call_seconds("all_reduce", size, n, cluster) for size in (0, nbytes))
    return whole < 2 * start


def ring_seconds(primitive: str, nbytes: float, n: int, link: Link) -> float:
    """The collective over `n` ranks whose links are all the same: a ring, for all_to_all pairs."""
    ring = _RINGS[primitive]
    passes = n / 2 if link.forwards and not ring.whole else 1
    return ring.rounds * (n - 1) * link.latency + collective_bytes(primitive, nbytes, n) * passes / link.bandwidth


def flat_seconds(primitive: str, nbytes: float, group: RankGroup) -> float:
    """One ring (for all_to_all pairs) over the whole group: each link's latency, the slowest one's bandwidth."""
    n, per_node, nodes, inner, outer = group
    if nodes == 1:
        return ring_seconds(primitive, nbytes, n, inner)
    ring = _RINGS[primitive]
    last = n - per_node * (nodes - 1)  # ranks in the last node
    crossing = nodes - 1 if ring.whole else n - last  # a ring enters each node once, pairs are of every two ranks
    steps = (n - 1 - crossing) * inner.latency + crossing * outer.latency
    return ring.rounds * steps + ring_seconds(primitive, nbytes, n, Link(0.0, group.slowest))


def tree_seconds(nbytes: float, group: RankGroup) -> float:
    """An all-reduce up and down a tree of nodes, whose ranks are a chain: NCCL's double binary tree, pipelined."""
    _, per_node, nodes, inner, outer = group
    steps = (per_node - 1) * inner.latency + math.ceil(math.log2(nodes)) * outer.latency
    return 2 * steps + 2 * nbytes / group.slowest


def hierarchical_seconds(primitive: str, nbytes: float, group: RankGroup) -> float:
    """First inside each node, then between the nodes over every device's own adapter, and back where need be.

    Args:
        primitive: one of all_reduce, all_gather, reduce_scatter, all_to_all.
        nbytes: bytes of the whole tensor.
        group: the ranks, with the links inside a node and between nodes.

    Raises:
        InputError: the nodes do not hold equally many of the group's ranks.
    """
    n, per_node, nodes, inner, outer = group
    if n != per_node * nodes:
        raise InputError(f"{n} ranks over {nodes} nodes of {per_node}: a hierarchy needs equally many in each.")
    between = group._replace(n=nodes, per_node=1)
    if primitive == "all_reduce":
        halves = sum(ring_seconds(p, nbytes, per_node, inner) for p in ("reduce_scatter", "all_gather"))
        part = nbytes / per_node
        return halves + min(flat_seconds(primitive, part, between), tree_seconds(part, between))
    inside = nbytes if _RINGS[primitive].whole else nbytes / nodes
    return ring_seconds(primitive, inside, per_node, inner) + ring_seconds(primitive, nbytes / per_node, nodes, outer)


def _check(primitive: str, nbytes: float, n: int, stride: int = 1) -> None:
    if primitive not in PRIMITIVES:
        raise InputError(f"there is no collective {primitive!r}. Use one of {', '.join(PRIMITIVES)}.")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise InputError(f"{primitive} of {nbytes!r} bytes: give a finite number of bytes, 0 or more.")
    if n < 1:
        raise InputError(f"{primitive} over {n!r} ranks: a group has at least one rank.")
    if stride < 1:
        raise InputError(f"{primitive} over ranks {stride!r} apart: neighbours are 1 apart, and others more.")
