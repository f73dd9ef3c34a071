"""A cluster's numbers from measured times: least squares of the logarithm of predicted over measured.

Relative errors would not do: a prediction that is too long can be off by more than one that is too short, so that the
fit would lean to short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autotp.cost.collectives import Link, RankGroup, collective_seconds, ring_seconds
from autotp.cost.compute import op_seconds

from .cluster import Cluster

ROUNDS = 30  # of reweighted least squares
LEAST_LATENCY = 1e-9  # seconds, which a fit may not go below: a link is never free, nor is it faster than memory


class Kernel(NamedTuple):
    """One measured kernel: what was run, what it computed and moved, and how long it took."""

    item: str
    dtype: str
    flops: float
    nbytes: float
    seconds: float

    def predicted(self, cluster: Cluster) -> float:
        """Seconds by the cost model."""
        return op_seconds(self.flops, self.nbytes, self.dtype, cluster)


class Transfer(NamedTuple):
    """One measured collective over `n` ranks, each `stride` after the one before; bytes of the whole tensor."""

    item: str
    nbytes: float
    n: int
    stride: int
    seconds: float

    def predicted(self, cluster: Cluster) -> float:
        """Seconds by the cost model."""
        return collective_seconds(self.item, self.nbytes, self.n, cluster, self.stride)


Sample = Kernel | Transfer


class Error(NamedTuple):
    """How far the fitted model is from the measured times of one item, each relative to the measured time."""

    item: str
    samples: int
    mean: float
    worst: float


def fit(kernels: Sequence[Kernel], transfers: Sequence[Transfer], base: Cluster) -> Cluster:
    """The cluster that comes closest to the measured times, by the squared logarithms of predicted over measured.

    Args:
        kernels: "launch" (a kernel that does nothing to speak of), "copy", and matmuls by dtype.
        transfers: collectives inside a node, and between nodes (of ranks that are all in different ones).
        base: gives every number that nothing was measured for, and the number of devices in a node. Where matmuls
            were measured, a dtype that was not is left out, so that it counts as float32.
    """
    launches = [k.seconds for k in kernels if k.item == "launch"]
    overhead = sum(launches) / len(launches) if launches else base.launch_overhead
    copies = [k for k in kernels if k.item == "copy"]
    products = [k for k in kernels if k.flops]
    fitted = replace(
        base,
        launch_overhead=overhead,
        collective_overhead=overhead if transfers else base.collective_overhead,  # the rest shows as latency
        memory_bandwidth=_rate([(k.nbytes, k.seconds - overhead) for k in copies], base.memory_bandwidth),
        peak_flops={
            d: _rate([(k.flops, k.seconds - overhead) for k in products if k.dtype == d], base.peak(d))
            for d in dict.fromkeys([*base.peak_flops, *(k.dtype for k in products)])
            if not products or d == "float32" or any(k.dtype == d for k in products)
        },
    )
    return _links(transfers, fitted)


def errors(samples: Iterable[Sample], cluster: Cluster) -> list[Error]:
    """By item, how far the cluster's predictions are from the samples."""
    off: dict[str, list[float]] = {}
    for s in samples:
        item = f"{s.item}, {s.n} ranks{f' {s.stride} apart' * (s.stride > 1)}" if isinstance(s, Transfer) else s.item
        off.setdefault(item, []).append(abs(s.predicted(cluster) / s.seconds - 1))
    return [Error(item, len(x), sum(x) / len(x), max(x)) for item, x in off.items()]


def _links(transfers: Sequence[Transfer], cluster: Cluster) -> Cluster:
    """The links in and between nodes, and whether a node has a switch: whichever fits its all-to-alls better."""
    inside = [t for t in transfers if not cluster.spans_nodes(t.n, t.stride)]
    between = [t for t in transfers if RankGroup.of(t.n, cluster, t.stride).per_node == 1 < t.n and t not in inside]
    least = 1 / cluster.memory_bandwidth
    outer, _ = _link(between, False, least)
    if outer is not None:
        cluster = replace(cluster, inter_latency=outer.latency, inter_bandwidth=outer.bandwidth)
    tries = [(switch, *_link(inside, not switch, least)) for switch in (cluster.switch, not cluster.switch)]
    switch, inner, _ = min(tries, key=lambda t: t[2])
    if inner is None:
        return cluster
    return replace(cluster, intra_latency=inner.latency, intra_bandwidth=inner.bandwidth, switch=switch)


def _link(transfers: Sequence[Transfer], forwards: bool, least: float) -> tuple[Link | None, float]:
    """Latency and bandwidth of the links of rings, and the sum of squared logarithms."""
    if not transfers:
        return None, 0.0
    steps = [ring_seconds(t.item, t.nbytes, t.n, Link(1.0, math.inf, forwards)) for t in transfers]
    byte_seconds = [ring_seconds(t.item, t.nbytes, t.n, Link(0.0, 1.0, forwards)) for t in transfers]
    seconds = [t.seconds for t in transfers]
    a, b, t = (torch.tensor(x, dtype=torch.float64) for x in (steps, byte_seconds, seconds))
    predicted, latency, per_byte = t, LEAST_LATENCY, least
    for _ in range(ROUNDS):
        weights = (predicted * t).rsqrt()  # (p - t) / sqrt(p t) is the logarithm of p / t, but for its third power
        latency, per_byte = _two(a * weights, b * weights, t * weights, least)
        predicted = latency * a + per_byte * b
    return Link(latency, 1 / per_byte, forwards), float((predicted / t).log().square().sum())


def _two(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor, least: float) -> tuple[float, float]:
    """Least squares x, y of a x + b y = t, with x at least `LEAST_LATENCY` and y at least `least`."""
    scale = torch.stack([a.max(), b.max()]).clamp_min(1e-300)  # the columns differ by many orders of magnitude
    solution = torch.linalg.lstsq(torch.stack([a, b], dim=1) / scale, t[:, None], driver="gelsd").solution
    x, y = (solution.flatten() / scale).tolist()
    if x < LEAST_LATENCY:
        x, y = LEAST_LATENCY, _one(b, t - LEAST_LATENCY * a)
    if y < least:
        x, y = max(_one(a, t - least * b), LEAST_LATENCY), least
    return x, y


def _one(a: torch.Tensor, right: torch.Tensor) -> float:
    return float((a * right).sum() / (a * a).sum().clamp_min(1e-300))


def _rate(points: Sequence[tuple[float, float]], default: float) -> float:
    """Work per second from (work, seconds)."""
    logarithms = [math.log(work / seconds) for work, seconds in points if seconds > 0]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else default
