"""Measure the machine that this process runs on, and describe it as a `Cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.comm.collectives import real
from autotp.comm.ranks import Ranks
from autotp.cost import Cluster
from autotp.cost.collectives import COLLECTIVES
from autotp.errors import InputError

from .clock import Clock
from .fit import Kernel, Sample, Transfer, errors, fit
from .operators import SIZES, kernels, product
from .this_machine import described

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def calibrate(
    mesh: DeviceMesh | None = None,
    *,
    name: str = "calibrated",
    base: str | Cluster | None = None,
    devices_per_node: int | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    show: bool = True,
) -> Cluster:
    """Measure the machine that this runs on and fit a `Cluster` to it.

    Matmuls by dtype, attention, operators bound by memory and the launch of a kernel are timed on every rank at once,
    so ranks that share a device's memory or a processor's cores share them here too; where there are ranks (torchrun),
    also each collective, over sizes and group sizes. Operands are read in turn, so that no cache holds them, as in a
    step; on a processor a matmul counts with all that eager execution starts for it. The numbers are least squares of
    the logarithms of predicted over measured times. Call it on all ranks alike.

    Args:
        mesh: whose ranks take part; otherwise the process group that is there, or one made under torchrun. In one
            plain process, or on one rank, links are not measured.
        name: what plans call the cluster.
        base: a cluster, a preset's name or a file, for what is not measured; default "h100" where there is a CUDA
            device, otherwise "local".
        devices_per_node: default: what torchrun started on this machine, where that is not all ranks; otherwise this
            machine's CUDA devices, or the base's number.
        dtypes: of the matmuls that are measured; float32 always is. A dtype left out counts as float32.
        show: print what was found with the fit's error, and how far the measuring is, on rank 0.

    Returns:
        The cluster, the same on every rank. `save` writes it to a file, which `cluster=` of the public functions takes.

    Raises:
        InputError: an argument is not what it must be. RankError: a rank has no device, or is not in the mesh.
    """
    if not all(isinstance(d, torch.dtype) for d in dtypes):
        raise InputError(f"dtypes={dtypes!r}: give torch's dtypes, such as [torch.float32, torch.bfloat16].")
    ranks = Ranks.find(None, mesh)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = ranks.device if ranks else torch.device(here)
    if base is None:
        base = "h100" if device.type == "cuda" else "local"
    start = Cluster.resolve(base)
    start = replace(start, **described(name, start, ranks, device, devices_per_node))
    first = ranks is None or ranks.rank == 0
    clock = Clock(ranks, device, SIZES[device.type].budget)
    with _progress(show and first) as step:
        measured = list(kernels(clock, dict.fromkeys([torch.float32, *dtypes]), step))
        transfers = list(_transfers(clock, start, step)) if ranks is not None and ranks.tp > 1 else []
    cluster = fit(measured, transfers, start)
    if show and first:
        console = Console()
        console.print(_table(cluster, measured, transfers))
        console.print(_numbers(cluster, transfers), highlight=False, soft_wrap=True)
    return cluster


def _transfers(clock: Clock, cluster: Cluster, step: Callable[[str], None]) -> Iterator[Transfer]:
    """Each collective over each size and group: neighbours in a node, and one rank of each node."""
    assert clock.ranks is not None
    world = clock.ranks.tp
    per_node = min(world, cluster.devices_per_node)
    inside = [(n, 1) for n in _degrees(per_node)]
    for n, stride in [*inside, *((n, per_node) for n in _degrees(world // per_node))]:
        group, work = _subgroup(clock.ranks, n, stride), product(clock.device)
        alone = clock.time(work)
        for primitive in COLLECTIVES:
            for size in SIZES[clock.device.type].transfers:
                step(f"{primitive}, {n} ranks")
                count = max(size // (4 * n * n), 1) * n * n  # elements that every primitive can deal out
                call = _collective(primitive, count, n, group, clock.device)
                # Beside work ranks come late to each other and sleep meanwhile, which costs more than calls in a row.
                beside = clock.time(lambda work=work, call=call: (work(), call())) - alone
                yield Transfer(primitive, 4.0 * count, n, stride, max(beside, clock.time(call)))
        if n < world:
            dist.destroy_process_group(group)


def _degrees(most: int) -> list[int]:
    """The sizes of groups that leave no rank over."""
    return [n for n in range(2, most + 1) if most % n == 0]


def _subgroup(ranks: Ranks, n: int, stride: int) -> ProcessGroup:
    """This rank's group of `n` ranks, `stride` apart; the other ranks are in groups of their own."""
    if n == ranks.tp:
        return ranks.group
    everyone, block = dist.get_process_group_ranks(ranks.group), n * stride
    starts = [start + offset for start in range(0, ranks.tp, block) for offset in range(stride)]
    groups = [everyone[start : start + n * stride : stride] for start in starts]
    if ranks.tp == dist.get_world_size():
        return dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[return-value]
    mine = next(g for g in groups if dist.get_rank() in g)  # ranks outside of the mesh are not here to take part
    return dist.new_group(mine, use_local_synchronization=True)  # type: ignore[return-value]


def _collective(
    primitive: str, count: int, n: int, group: ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A call of the primitive, as plans run it, whose whole tensor has `count` float32 elements."""
    shape = {"all_reduce": (count,), "all_gather": (count // n,), "reduce_scatter": (n, count // n)}
    x = torch.zeros(shape.get(primitive, (n, count // (n * n))), device=device)
    return lambda: real(primitive, x, "sum", tp=n, group=group.group_name)  # type: ignore[arg-type]


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[str], None]]:
    """`step(what)` before each measurement; shows how many there were, and goes away."""
    columns = (TextColumn("calibrating: {task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as progress:
        task = progress.add_task("", total=None)
        yield lambda what: progress.update(task, description=what, advance=1)


def _table(cluster: Cluster, kernels: list[Kernel], transfers: list[Transfer]) -> Table:
    """How far the cluster's predictions are from each item's times."""
    samples: list[Sample] = [*kernels, *transfers]
    table = Table(title=f"{cluster.name}: {cluster.device}", title_justify="left")
    for column in ("measured", "sizes", "mean error of the fit", "worst"):
        table.add_column(column, justify="left" if column == "measured" else "right")
    for e in errors(samples, cluster):
        table.add_row(e.item, str(e.samples), f"{e.mean:.0%}", f"{e.worst:.0%}")
    return table


def _numbers(c: Cluster, transfers: list[Transfer]) -> str:
    """The fitted numbers, in words."""

    def link(latency: float, bandwidth: float, measured: bool) -> str:
        return f"{latency * 1e6:.3g} us, {bandwidth / 1e9:.3g} GB/s{'' if measured else ' (not measured)'}"

    rates = ", ".join(f"{d} {r / 1e9:.4g}" for d, r in c.peak_flops.items())
    inside = link(c.intra_latency, c.intra_bandwidth, any(t.stride == 1 for t in transfers))
    between = link(c.inter_latency, c.inter_bandwidth, any(c.spans_nodes(t.n, t.stride) for t in transfers))
    memory = f"memory {c.memory_bandwidth / 1e9:.4g} GB/s, launch {c.launch_overhead * 1e6:.3g} us"
    memory += f", {c.product_launches:.3g} launches a matmul"
    products = (
        f"matmuls move their operands {c.packing:.2g} times besides, attention at {c.attention_rate:.0%} of the rate"
    )
    return f"GFLOP/s: {rates}\n{memory}\n{products}\nin a node: {inside}\nbetween nodes: {between}"
