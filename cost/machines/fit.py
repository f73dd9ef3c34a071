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
from autotp.cost.compute import op_cost, op_seconds

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
        rate = cluster.attention_rate if self.item == "attention" else 1.0
        return op_seconds(self.flops / rate, self.nbytes, self.dtype, cluster)


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
        kernels: "launch" (a kernel that does nothing to speak of), "product launch" (a matrix product of that kind),
            matmuls by dtype, "attention", and operators without arithmetic to count.
        transfers: collectives inside a node, and between nodes (of ranks that are all in different ones).
        base: gives every number that nothing was measured for, and the number of devices in a node. Where matmuls
            were measured, a dtype that was not is left out, so that it counts as float32.
    """
    overhead = _mean(kernels, "launch", base.launch_overhead)
    start = replace(
        base,
        launch_overhead=overhead,
        product_launches=_mean(kernels, "product launch", overhead * base.product_launches) / overhead,
        collective_overhead=overhead if transfers else base.collective_overhead,  # the rest shows as latency
    )
    start = replace(start, memory_bandwidth=_bandwidth(kernels, start))
    tries = [_rates(kernels, replace(start, packing=times)) for times in (0.0, _packing(kernels, start))]
    products = [k for k in kernels if k.item.startswith("matmul")]
    best = min(tries, key=lambda cluster: _distance(products, cluster))
    return _links(transfers, replace(best, attention_rate=_attention(kernels, best)))


def _mean(kernels: Sequence[Kernel], item: str, default: float) -> float:
    """Mean seconds of the kernels of this item."""
    seconds = [k.seconds for k in kernels if k.item == item]
    return sum(seconds) / len(seconds) if seconds else default


def _own(kernels: Sequence[Kernel], item: str, cluster: Cluster) -> list[Kernel]:
    """The kernels of this item with their seconds after the launch."""
    same = [k for k in kernels if k.item == item]
    return [k._replace(seconds=k.seconds - op_cost(k.flops, k.nbytes, k.dtype, cluster)["launches"]) for k in same]


def _bandwidth(kernels: Sequence[Kernel], start: Cluster) -> float:
    """B/s of the operators without arithmetic to count."""
    items = dict.fromkeys(k.item for k in kernels if not k.flops and k.item != "launch")
    own = [k for item in items for k in _own(kernels, item, start)]
    return _rate([(k.nbytes, k.seconds) for k in own], start.memory_bandwidth)


def _attention(kernels: Sequence[Kernel], cluster: Cluster) -> float:
    """Part of the peak rate that fused attention reaches."""
    per_byte = cluster.packing / cluster.memory_bandwidth
    own = [k._replace(seconds=k.seconds - k.nbytes * per_byte) for k in _own(kernels, "attention", cluster)]
    return _rate([(k.flops / cluster.peak(k.dtype), k.seconds) for k in own], cluster.attention_rate)


def _packing(kernels: Sequence[Kernel], start: Cluster) -> float:
    """Times that products move their operands besides their arithmetic; 0 where nothing says so."""
    own = [k for k in _own(kernels, "matmul float32", start) if k.seconds > 0]
    if not own:
        return 0.0
    flops, nbytes, seconds = torch.tensor([(k.flops, k.nbytes, k.seconds) for k in own], dtype=torch.float64).unbind(1)
    return _nearest(flops, nbytes, seconds, (0.0, 0.0))[1] * start.memory_bandwidth


def _rates(kernels: Sequence[Kernel], start: Cluster) -> Cluster:
    """The cluster with the peak rates of the products that were measured."""
    dtypes = dict.fromkeys(k.dtype for k in kernels if k.item.startswith("matmul"))
    peaks = {d: start.peak(d) for d in start.peak_flops if not dtypes or d == "float32"}
    for dtype in dtypes:
        own, per_byte = _own(kernels, f"matmul {dtype}", start), start.packing / start.memory_bandwidth
        peaks[dtype] = _rate([(k.flops, k.seconds - k.nbytes * per_byte) for k in own], start.peak(dtype))
    return replace(start, peak_flops=peaks)


def _distance(kernels: Sequence[Kernel], cluster: Cluster) -> float:
    """The sum of squared logarithms of predicted over measured."""
    return sum(math.log(k.predicted(cluster) / k.seconds) ** 2 for k in kernels)


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
    latency, per_byte = _nearest(a, b, t, (LEAST_LATENCY, least))
    predicted = latency * a + per_byte * b
    return Link(latency, 1 / per_byte, forwards), float((predicted / t).log().square().sum())


def _nearest(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor, least: tuple[float, float]) -> tuple[float, float]:
    """x and y, each at least so much, for which a x + b y comes closest to t in squared logarithms."""
    predicted, x, y = t, *least
    for _ in range(ROUNDS):
        weights = (predicted * t).rsqrt()  # (p - t) / sqrt(p t) is the logarithm of p / t, but for its third power
        x, y = _two(a * weights, b * weights, t * weights, least)
        predicted = x * a + y * b
    return x, y


def _two(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor, least: tuple[float, float]) -> tuple[float, float]:
    """Least squares x, y of a x + b y = t, each at least so much."""
    scale = torch.stack([a.max(), b.max()]).clamp_min(1e-300)  # the columns differ by many orders of magnitude
    solution = torch.linalg.lstsq(torch.stack([a, b], dim=1) / scale, t[:, None], driver="gelsd").solution
    x, y = (solution.flatten() / scale).tolist()
    if x < least[0]:
        x, y = least[0], _one(b, t - least[0] * a)
    if y < least[1]:
        x, y = max(_one(a, t - least[1] * b), least[0]), least[1]
    return x, y


def _one(a: torch.Tensor, right: torch.Tensor) -> float:
    return float((a * right).sum() / (a * a).sum().clamp_min(1e-300))


def _rate(points: Sequence[tuple[float, float]], default: float) -> float:
    """Work per second from (work, seconds)."""
    logarithms = [math.log(work / seconds) for work, seconds in points if seconds > 0]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else default
