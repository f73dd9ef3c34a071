"""Measure the machine that this process runs on, and describe it as a `Cluster`: work over time, without a fit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from autotp.comm.collectives import real
from autotp.comm.ranks import Ranks, from_all
from autotp.cost import Cluster
from autotp.cost.collective_costs import COLLECTIVES, Link, ring_seconds
from autotp.errors import InputError
from autotp.ir.op import dtype_name

from .this_machine import described

Amount = tuple[float, float]  # of work, and the seconds that it took

Run = Callable[[], object]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BATCHES = 5  # of calls
MAX_CALLS = 1000  # in a batch: many launches, and turns on a shared core
LAUNCHES = 48  # operators that a launch is the mean of
TINY_ROWS = 8  # and width of a product that is all launch
UNLIKE = 1.25  # times the slowest rank's rate or memory that another has where the ranks count as unlike
SLOW_SECONDS = 0.05  # of a matmul after which no larger one of its dtype is measured
PASSES = 3  # the cost model counts a backward as twice its forward
COLD_BYTES = 2**26  # of operands taken in turn, more than a core's cache: what a step multiplies was read a step ago
LEAST_LATENCY = 1e-9  # seconds: a link is never free
LEAST_SHARE = 0.1  # of a kernel's time that is its own, and not its launch
HIDDEN = 2.0  # launches that a kernel takes on a device with a queue, from which on the next one's launch is within it
UNITS = {
    "launch_overhead": (1e6, "us"),
    "product_launches": (1.0, "launches"),
    "memory_bandwidth": (1e-9, "GB/s"),
    "intra_latency": (1e6, "us"),
    "intra_bandwidth": (1e-9, "GB/s"),
    "inter_latency": (1e6, "us"),
    "inter_bandwidth": (1e-9, "GB/s"),
}  # a field of `Cluster` -> its unit on the screen

SPENT = {"launch_overhead", "product_launches"}  # fields of which the most is the worst
Samples = dict[str, list[float]]  # a field of `Cluster`, or a dtype's name for its rate -> its samples


@dataclass(frozen=True)
class Clock:
    """Times calls, on all ranks alike where there are some."""

    ranks: Ranks
    device: torch.device
    budget: float

    def time(self, call: Run) -> float:
        """Return the median seconds of one call that ranks make together; the slowest rank's, on every rank."""
        return self.worst(statistics.median(self._batches(call, self.worst)))

    def alone(self, call: Run) -> float:
        """Return this rank's mean seconds of one call that all ranks make at the same time, each as often as it can.

        A device that is throttled works and pauses: of short batches most may have no pause in them, or all.
        """
        return statistics.mean(self._batches(call, float))

    def _batches(self, call: Run, agreed: Callable[[float], float]) -> list[float]:
        """List the seconds of a call in each batch; `agreed`: what ranks make of those of one, to make equally many."""
        self._batch(call, 1)
        once = max(agreed(self._batch(call, 1)), 1e-7)
        calls = min(max(int(self.budget / BATCHES / once), 1), MAX_CALLS)
        return [self._batch(call, calls) for _ in range(BATCHES)]

    def worst(self, seconds: float) -> float:
        """Return the most of all ranks."""
        if self.ranks.tp == 1:
            return seconds
        worst = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.ranks.group)
        return float(worst)

    def _batch(self, call: Run, calls: int) -> float:
        self.worst(0.0)  # every rank starts now
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begun) / calls


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes that are measured on a kind of device.

    Attributes:
        matmuls: rows and width of square weights; the second is what ranks compute between two collectives.
        copies: bytes, on a GPU more than its cache.
        transfers: bytes of the whole tensor, of a short message and of a long one.
        budget: seconds for each: several cycles of a throttle.
    """

    matmuls: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]
    transfers: tuple[int, int]
    budget: float = 0.2


SIZES = {
    "cpu": MeasuredSizes(
        ((96, 192), (384, 384), (768, 192), (48, 768), (768, 768)), (2**18, 2**20, 2**22), (2**12, 2**21)
    ),
    "cuda": MeasuredSizes(
        ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192)), (2**27, 2**28, 2**29), (2**12, 2**27)
    ),
}


@torch.inference_mode(False)
@torch.enable_grad()
def calibrate(
    mesh: DeviceMesh | None = None,
    *,
    name: str = "calibrated",
    base: str | Cluster | None = None,
    devices_per_node: int | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    show: bool = True,
) -> Cluster:
    """Measure the machine that this runs on and describe it as a `Cluster`.

    Matmuls by dtype, an operator bound by memory and the launch of a kernel are timed on every rank at once, so ranks
    that share a device's memory or a processor's cores share them here too; where there are ranks (torchrun), also
    each collective, short and long, over the ranks of a node and over one rank of each node. Operands are read in
    turn, so that no cache holds them, as in a step. A rate is the work of all sizes over its time, a link's figure the
    median of what the collectives say. Where ranks are unlike (by their names, or by a quarter in rate, bandwidth or
    memory) the cluster has what each measured. Call it on all ranks alike.

    Args:
        mesh: whose ranks take part; otherwise the process group that is there, or one made under torchrun. In one
            plain process, or on one rank, links are not measured.
        name: what plans call the cluster.
        base: a cluster, a preset's name or a file, for what is not measured; default "h100" where there is a CUDA
            device, otherwise "local".
        devices_per_node: default: what torchrun started on this machine, where that is not all ranks; otherwise this
            machine's CUDA devices, or the base's number.
        dtypes: of the matmuls that are measured; float32 always is. A dtype left out counts as float32.
        show: print each median with the least and the most of its samples, on rank 0; of unlike ranks for each.

    Returns:
        The cluster, the same on every rank. `save` writes it to a file, which `cluster=` of the public functions takes.

    Raises:
        InputError: an argument is not what it must be. RankError: a rank has no device, or is not in the mesh.
    """
    if not all(isinstance(d, torch.dtype) for d in dtypes):
        raise InputError(f"dtypes={dtypes!r}: give torch's dtypes, such as [torch.float32, torch.bfloat16].")
    ranks = Ranks.find(None, mesh)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = ranks.device if ranks.mesh is not None else torch.device(here)
    if base is None:
        base = "h100" if device.type == "cuda" else "local"
    start = Cluster.resolve(base)
    start = replace(start, **described(name, start, ranks, device, devices_per_node))
    clock = Clock(ranks, device, SIZES[device.type].budget)
    of_ranks = [(start, kernel_samples(clock, dict.fromkeys([torch.float32, *dtypes])))]
    links = {}
    if ranks.tp > 1:
        links = _links(clock, ranks, start)
        of_ranks = from_all(ranks, of_ranks[0], "what each rank measured")
    cluster, of_kinds = together(of_ranks, links)
    if show and ranks.rank == 0:
        for machine, samples in of_kinds:
            print(f"{machine.name}: {machine.device}", *_lines(machine, samples), sep="\n")
        if cluster.ranks:
            print(f"{name}: what ranks do in the same time is {':'.join(map(str, cluster.ratio()))}")
    return cluster


def together(of_ranks: list[tuple[Cluster, Samples]], links: Samples) -> tuple[Cluster, list[tuple[Cluster, Samples]]]:
    """Return the cluster of ranks that each measured itself, and what is to be shown of it: a rank of each kind.

    Args:
        of_ranks: of each rank the cluster that it starts from, and its samples. links: samples of collectives.
    """
    machines = [with_medians(samples | links, base) for base, samples in of_ranks]
    kinds = []  # of each rank the first that it is alike
    worst = {}
    for (base, samples), machine in zip(of_ranks, machines, strict=True):
        kinds.append(next(rank for rank, first in enumerate(machines) if _alike(first, machine)))
        _, of_kind = worst.setdefault(kinds[-1], (base, dict(samples)))
        for field, values in samples.items():
            of_kind[field] = [*map(max if field in SPENT else min, values, of_kind[field])]
    machines = [with_medians(worst[kind][1] | links, worst[kind][0]) for kind in kinds]
    cluster = Cluster(ranks=machines, name=machines[0].name, source=machines[0].source)
    return cluster, [(base, samples | links) for base, samples in worst.values()]


def _alike(a: Cluster, b: Cluster) -> bool:
    """Say whether ranks count as of one kind."""
    figures = [(x.peak("float32"), x.memory_bandwidth, x.memory_size) for x in (a, b)]
    return a.device == b.device and all(max(x) < UNLIKE * min(x) for x in zip(*figures, strict=True))


def with_medians(samples: Samples, base: Cluster) -> Cluster:
    """Return the cluster with the median of each field's samples; a field without samples stays.

    Args:
        samples: by field; rates by dtype. Where there are some, a dtype that has none counts as float32.
        base: gives what has no samples.
    """
    medians = {name: statistics.median(x) for name, x in samples.items()}
    rates = {name: x for name, x in medians.items() if name not in UNITS}
    cluster = replace(base, **{name: x for name, x in medians.items() if name in UNITS})
    if rates:
        cluster = replace(cluster, peak_flops={"float32": base.peak("float32"), **rates})
    # What a collective takes before its first step shows in its latency, but for the start of a kernel.
    return replace(cluster, collective_overhead=cluster.launch_overhead) if "intra_latency" in samples else cluster


# ---- kernels -----------------------------------------------------------------------------------------------------


def kernel_samples(clock: Clock, dtypes: Iterable[torch.dtype]) -> Samples:
    """Time launches, an operator bound by memory, and products of each dtype that all devices have them for.

    Args:
        clock: of this rank; its device is measured. dtypes: of the products.
    """
    sizes, device = SIZES[clock.device.type], clock.device
    queued = device.type != "cpu"
    run = _layer if device.type == "cpu" else _products  # what eager execution starts besides a device's queue hides
    launch = clock.alone(partial(_launches, device)) / LAUNCHES
    product = clock.alone(_in_turn(run, [(TINY_ROWS, TINY_ROWS)] * 3, torch.float32, device)) / PASSES
    times = []
    for size in sizes.copies:
        seconds = clock.alone(_in_turn(_gelu, [(size // 1024, 256)], torch.float32, device)) / PASSES
        times.append((2.0 * size, own_seconds(seconds, launch, queued)))
    samples = {"launch_overhead": [launch], "product_launches": [product / launch], "memory_bandwidth": rates(times)}
    for dtype in dtypes:
        if clock.worst(not _multiplies(device, dtype)):  # on some rank
            continue
        times = []
        for rows, n in sizes.matmuls:
            operands = [(rows, n), (n, n), (rows, n)]
            seconds = clock.alone(_in_turn(run, operands, dtype, device)) / PASSES
            times.append((2.0 * rows * n * n, own_seconds(seconds, product, queued)))
            if clock.worst(seconds) > SLOW_SECONDS:  # a device is slow with the dtype
                break
        samples[dtype_name(dtype)] = rates(times)
    return samples


def rates(times: Sequence[Amount]) -> list[float]:
    """Return the least rate, that of all work together, which is their median, and the most.

    Args:
        times: amounts of work, and the seconds of each.
    """
    alone = [work / seconds for work, seconds in times]
    work, seconds = map(sum, zip(*times, strict=True))
    return [min(alone), work / seconds, max(alone)]


def own_seconds(seconds: float, launch: float, queued: bool) -> float:
    """Return the seconds of a kernel after its launch; `queued`: its device has a queue, in which it waits for others.

    Of many calls one after the other what a queue hides takes no time: a kernel then has all of them.
    """
    if queued and seconds > HIDDEN * launch:
        return seconds
    return max(seconds - launch, LEAST_SHARE * seconds)


def _products(x: Tensor, w: Tensor, g: Tensor) -> object:
    """Multiply as a linear layer does, forward and backward: laid out differently, these take different times."""
    return x @ w.T, g @ w, g.T @ x


def _layer(x: Tensor, w: Tensor, g: Tensor) -> object:
    """Run a linear layer forward and backward, with all that eager execution starts for its three products."""
    x, w, bias = (t.detach().requires_grad_() for t in (x, w, g[0]))
    return F.linear(x, w, bias).backward(g)


def _gelu(x: Tensor) -> object:
    """Run a GeLU forward and backward."""
    y = F.gelu(x.detach().requires_grad_())
    return y.backward(x)


def _launches(device: torch.device) -> None:
    """Run a chain of operators on next to nothing, forward and backward, as eager training runs them."""
    x = w = torch.ones(8, device=device, requires_grad=True)
    for _ in range(LAUNCHES // 3):  # one operator forward, two backward: as the cost model counts
        x = x * w
    x.backward(torch.ones_like(x))


def _in_turn(
    run: Callable[..., object], shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Run:
    """Return a call on operands of these shapes, others each time until `COLD_BYTES` have been read."""
    count = max(COLD_BYTES // (sum(map(math.prod, shapes)) * dtype.itemsize), 1)
    # Random numbers: a device multiplies ones faster, for they take less power.
    operands = cycle(zip(*(torch.rand(count, *shape, device=device).to(dtype) for shape in shapes), strict=True))
    return lambda: run(*next(operands))


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    x = torch.ones(8, 8, dtype=dtype, device=device)
    try:
        _products(x, x, x)
    except RuntimeError:  # "not implemented for": the device, or this build of torch, lacks the dtype
        return False
    return True


# ---- links -------------------------------------------------------------------------------------------------------


def _links(clock: Clock, ranks: Ranks, cluster: Cluster) -> Samples:
    """Time a short and a long message of each collective: over the ranks of a node, and over one rank of each node."""
    everyone, per_node = dist.get_process_group_ranks(ranks.group), min(ranks.tp, cluster.devices_per_node)
    groups = {
        "intra": [everyone[first : first + per_node] for first in range(0, ranks.tp, per_node)],
        "inter": [everyone[first::per_node] for first in range(per_node)],
    }
    samples = {}
    for kind, parts in groups.items():
        n = len(next(part for part in parts if dist.get_rank() in part))
        if n == 1:
            continue
        whole, forwards = n == ranks.tp, kind == "intra" and not cluster.switch
        group: Any = ranks.group if whole else _subgroup(parts)
        for primitive in COLLECTIVES:
            timed = [_transfer(clock, primitive, size, n, group) for size in SIZES[clock.device.type].transfers]
            latency, bandwidth = link_of(primitive, n, timed, forwards, 1 / cluster.memory_bandwidth)
            samples.setdefault(f"{kind}_latency", []).append(latency)
            samples.setdefault(f"{kind}_bandwidth", []).append(bandwidth)
        if not whole:
            dist.destroy_process_group(group)
    return samples


def _subgroup(parts: list[list[int]]) -> Any:
    """Make this rank's group of those that share out the mesh."""
    if sum(map(len, parts)) == dist.get_world_size():
        return dist.new_subgroups_by_enumeration(parts)[0]
    # Ranks outside of the mesh are not here to take part. Torch names such a group by how many each rank is in.
    return dist.new_group(next(p for p in parts if dist.get_rank() in p), use_local_synchronization=True)


def link_of(primitive: str, n: int, timed: Sequence[Amount], forwards: bool, least: float) -> Amount:
    """Return latency and bandwidth of the links of a ring over which a short and a long message took so long.

    Args:
        primitive: the collective. n: ranks. timed: bytes of the whole tensor and seconds, of both messages.
        forwards: whether ranks forward for each other. least: seconds that a byte takes at least.
    """
    steps = ring_seconds(primitive, 0.0, n, Link(1.0, math.inf, forwards))
    (short, first), (long, second) = ((ring_seconds(primitive, x, n, Link(0.0, 1.0, forwards)), t) for x, t in timed)
    per_byte = max((second - first) / (long - short), least)
    return max((first - per_byte * short) / steps, LEAST_LATENCY), 1 / per_byte


def _transfer(clock: Clock, primitive: str, size: int, n: int, group: dist.ProcessGroup) -> Amount:
    """Time a call of the primitive, as plans run it, on a whole tensor of about so many bytes: bytes, and seconds."""
    rows, width = SIZES[clock.device.type].matmuls[1]
    x, w = torch.rand(rows, width, device=clock.device), torch.rand(width, width, device=clock.device)
    count = max(size // (4 * n * n), 1) * n * n  # elements that every primitive can split evenly
    shape = {"all_reduce": (count,), "all_gather": (count // n,), "reduce_scatter": (n, count // n)}
    message = torch.zeros(shape.get(primitive, (n, count // (n * n))), device=clock.device)

    def call() -> object:
        return real(primitive, message, "sum", tp=n, group=group.group_name)  # type: ignore[arg-type]

    # Beside work ranks come late to each other and sleep meanwhile, which costs more than calls in a row.
    beside = clock.time(lambda: (x @ w @ w @ w, call())) - clock.time(lambda: x @ w @ w @ w)
    return 4.0 * count, max(beside, clock.time(call))


def _lines(cluster: Cluster, samples: Samples) -> Iterator[str]:
    """Write each median beside the least and the most of its samples, and what was not measured."""
    yield f"{'measured':20}{'samples':>8}{'median':>12}{'least':>12}{'most':>12}"
    for name in [*UNITS, *(x for x in samples if x not in UNITS)]:
        scale, unit = UNITS.get(name, (1e-9, "GFLOP/s"))
        values = samples.get(name) or [getattr(cluster, name)]
        amounts = (f"{scale * x:>12.4g}" for x in (statistics.median(values), min(values), max(values)))
        count = len(values) if name in samples else "none"
        yield f"{name:20}{count:>8}{''.join(amounts)}  {unit}"
