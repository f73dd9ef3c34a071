"""Weights over the data-parallel axis: gradients summed over it, weights split over it where that is asked for.

Torch does it: `fully_shard` splits weights, gathers them before use and reduce-scatters gradients, `replicate` keeps
them whole and all-reduces gradients, both beside the backward, one group for each repeated block (Zhao et al. 2023).
Gradients come as the mean over the axis; see `batch.scale_gradient`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from autotp import compat
from autotp.comm.ranks import Ranks
from autotp.cost import call_seconds, collective_bytes
from autotp.errors import StateError
from autotp.passes.shard.planner import Builder, Planned
from autotp.plans.describe.layer_times import primitive
from autotp.plans.estimates import Axis, Memory
from autotp.plans.plan import Parameter, Plan

from .tree import Read, block_of

if TYPE_CHECKING:
    from .module import ShardedModule


def described(plan: Plan, planned: Planned, builder: Builder, axis: Axis) -> Plan:
    """The plan with what the data-parallel axis costs: a call for each repeated block, and one for what is left."""
    if axis.size == 1:
        return plan
    prices, trained = builder.prices, {x.name for x in planned.program.leaves if x.node in planned.grads}
    sent = seconds = 0.0
    gathered: list[float] = [0.0]
    for weights in _blocks(plan.parameters).values():
        whole, graded = _bytes(weights), _bytes(p for p in weights if p.name in trained)
        gathered.append(whole)
        for call, size in _calls(axis, whole, graded if builder.objective.training else 0.0):
            sent += collective_bytes(call, size, axis.size)
            seconds += call_seconds(call, size, axis.size, builder.cluster, plan.tp)
    values = 0.0
    for op in planned.ops.values():
        if "dp" in op.node.meta:
            src, dst, n = op.node.meta["dp"]
            values += _value_bytes(prices, op, src, dst, n, op.node in planned.grads and builder.objective.training)
    backward = 2 / 3 * (plan.totals.seconds - plan.totals.communication) if builder.objective.training else 0.0
    priced = replace(axis, sent=sent, seconds=seconds, values=values, backward=backward)
    held = -(-plan.totals.local_parameters // axis.size) if axis.fully_shard else plan.totals.local_parameters
    totals = replace(plan.totals, local_parameters=held)
    return replace(plan, batch=priced, totals=totals, memory=_split(plan.memory, axis, max(gathered)))


def _calls(axis: Axis, whole: float, graded: float) -> list[tuple[str, float]]:
    """The collectives of a block in a step, with the bytes of the whole value."""
    if not axis.fully_shard:
        return [("all_reduce", graded)] if graded else []
    gathers = [("all_gather", whole)] * (2 if graded else 1)
    return [*gathers, *([("reduce_scatter", graded)] if graded else [])]


def _value_bytes(prices: Any, op: Any, src: Any, dst: Any, n: int, trained: bool) -> float:
    """Bytes that a rank sends for a conversion over the axis."""
    size = max(prices.bytes(op.slots[0].meta["val"]), prices.bytes(op.node.meta["val"]))
    ways = [(src, dst), (dst.dual, src.dual)] if trained else [(src, dst)]
    return sum(collective_bytes(primitive(a, b) or "none", size, n) for a, b in ways)


def _blocks(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    out: dict[str, list[Parameter]] = defaultdict(list)
    for p in parameters:
        out[block_of(p.name)].append(p)
    return out


def _bytes(parameters: Iterable[Parameter]) -> float:
    """What the fullest tp rank holds of them."""
    return float(sum(math.prod(p.local) * getattr(torch, p.dtype).itemsize for p in parameters))


def _split(memory: Memory, axis: Axis, gathered: float) -> Memory:
    if not axis.fully_shard:
        return memory
    parts = {k: getattr(memory, k) / axis.size for k in ("parameters", "gradients", "states")}
    return replace(memory, **parts, working=memory.working + gathered)


def spread(root: ShardedModule, reads: Iterable[Read]) -> None:
    """Hand the weights of each repeated block that alone reads them, and then the rest, to torch's data parallelism."""
    ranks, axis = root._source.ranks, root._plan.batch
    assert ranks is not None and ranks.batch is not None
    units = {r.name: r.unit for r in reads if r.storage is not None}
    if root._units:
        moved = [n for n, unit in units.items() if root._units.get(n, "") not in (unit, "")]
        if moved:
            raise StateError(
                f"{moved[0]} is gathered with {root._units[moved[0]]}, and for this call it is read outside of that. "
                "Compile with example_inputs like this call's."
            )
        return
    root._units.update(units)
    scalars = average_scalars(root, root.parameters())
    apply: Any = fully_shard if axis.fully_shard else compat.replicate
    for path in [*dict.fromkeys(unit for unit in units.values() if unit), ""]:
        apply(root._parts[path], mesh=ranks.batch.mesh, ignored_params=scalars)


def average_scalars(root: ShardedModule, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """With dp: average the gradients of those that are scalars, which torch does not take, one by one."""
    ranks = root._source.ranks
    scalars = {p for p in parameters if p.ndim == 0}
    for p in scalars:
        if p.requires_grad and ranks is not None and ranks.batch is not None:
            p.register_post_accumulate_grad_hook(functools.partial(_average, root, ranks.batch))
    return scalars


def _average(root: ShardedModule, ranks: Ranks, parameter: Tensor) -> None:
    """The mean of a gradient over dp, in place; of one that is the mean already it is the same."""
    if root._summing:
        grad: Any = parameter.grad
        dist.all_reduce(grad.to_local(), group=ranks.group)
        grad.to_local().div_(ranks.tp)


def refuse_others(root: ShardedModule) -> None:
    """Refuse a data parallelism that was put around parts of the module beside its own."""
    dp = root._plan.batch.size
    if dp == 1:
        return
    ours = {root._parts[path] for path in [*root._units.values(), ""]}
    other = next((name for name, m in root.named_modules() if isinstance(m, FSDPModule) and m not in ours), None)
    if other is not None:
        raise StateError(
            f"{other} was wrapped in fully_shard or replicate, and autotp.compile(dp={dp}) deals out "
            "the batch already. Leave out dp, or the wrapping; fully_shard=True splits weights over dp."
        )


def refuse_twice(root: ShardedModule, outputs: Iterable[Any]) -> None:
    """Refuse to differentiate a backward with dp: by then torch has freed weights that it gathered."""
    for value in outputs if root._plan.batch.size > 1 else ():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.register_hook(_once)


def _once(grad: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward: create_graph=True
        raise StateError(
            "create_graph=True: with dp a backward cannot be differentiated again, because torch's data parallelism "
            "keeps nothing for that. Compile over tp alone (without dp) for gradients of gradients."
        )


@contextlib.contextmanager
def no_sync(root: ShardedModule) -> Iterator[None]:
    """Backwards in this context leave gradients unsummed over dp; the next one outside sums them all."""
    if root._plan.batch.size == 1:
        yield
        return
    assert isinstance(root, FSDPModule)
    root._summing = False
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root._summing = True
        root.set_requires_gradient_sync(True)
