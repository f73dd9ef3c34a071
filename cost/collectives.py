"""What a collective sends and how long it takes, by the alpha-beta model of ring algorithms.

A step costs the link's latency (alpha) and bytes over its bandwidth (beta): Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005). `D` is the bytes of the whole tensor, `n` the
ranks of a contiguous group:

| primitive | seconds | bytes a rank sends |
| --- | --- | --- |
| all_reduce | 2(n-1) alpha + 2(n-1)/n D/beta | 2(n-1)/n D |
| all_gather, reduce_scatter | (n-1) alpha + (n-1)/n D/beta | (n-1)/n D |
| all_to_all | (n-1) alpha + (n-1)/n^2 D/beta; a ring forwards: n/2 times the bytes pass each link | (n-1)/n^2 D |
| local | launch + D / memory bandwidth: a copy on each rank, D the bytes it reads and writes | 0 |
| none | 0 | 0 |

A group that leaves its node is priced as one flat ring over its slowest link. Hierarchical algorithms and rings over
several network adapters do better.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autotp.errors import InputError

from .cluster import Cluster


class _Ring(NamedTuple):
    rounds: int  # of n - 1 steps each
    whole: bool  # whether a step moves 1/n of the whole tensor, or of a rank's own 1/n of it


_RINGS = {
    "all_reduce": _Ring(2, True),
    "all_gather": _Ring(1, True),
    "reduce_scatter": _Ring(1, True),
    "all_to_all": _Ring(1, False),
}
PRIMITIVES = (*_RINGS, "local", "none")


def collective_bytes(primitive: str, nbytes: float, n: int) -> float:
    """Bytes that each rank sends.

    Arguments:
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


def collective_seconds(primitive: str, nbytes: float, n: int, cluster: Cluster) -> float:
    """Seconds that the collective takes, by the formulas at the head of this file.

    Arguments:
        primitive: one of all_reduce, all_gather, reduce_scatter, all_to_all, local, none.
        nbytes: bytes of the whole tensor; for `local` those that one rank reads and writes.
        n: ranks of the group, contiguous in the cluster.
        cluster: gives latency and bandwidth, in the node if the group fits into one.

    Raises:
        InputError: an unknown primitive, negative or infinite bytes, or fewer than one rank.
    """
    sent = collective_bytes(primitive, nbytes, n)
    if primitive == "local":
        return cluster.launch_overhead + nbytes / cluster.memory_bandwidth
    ring = _RINGS.get(primitive)
    if ring is None or n == 1:
        return 0.0
    latency, bandwidth = cluster.link(n)
    # Networks between nodes are switched, so only a group inside a node without a switch has to forward.
    forwards = not ring.whole and not cluster.switch and not cluster.spans_nodes(n)
    return ring.rounds * (n - 1) * latency + sent * (n / 2 if forwards else 1) / bandwidth


def _check(primitive: str, nbytes: float, n: int) -> None:
    if primitive not in PRIMITIVES:
        raise InputError(f"there is no collective {primitive!r}. Use one of {', '.join(PRIMITIVES)}.")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise InputError(f"{primitive} of {nbytes!r} bytes: give a finite number of bytes, 0 or more.")
    if n < 1:
        raise InputError(f"{primitive} over {n!r} ranks: a group has at least one rank.")
