"""Weights over the data-parallel axis: gradients summed over it, weights split over it where that is asked for.

Torch does it: `fully_shard` splits weights, gathers them before use and reduce-scatters gradients, `replicate` keeps
them whole and all-reduces gradients, both beside the backward, one group for each repeated block (Zhao et al. 2023).
Gradients come as the mean over the axis; see `autotp.passes.shard.batch_axis.scale_gradient`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autotp import compat
from autotp.comm.lockstep import around_backwards
from autotp.comm.ranks import Ranks
from autotp.comm.turn import within
from autotp.errors import StateError

from .storage import ShardState
from .weight_reads import Read

RECOMPUTED = (
    "torch.utils.checkpoint(use_reentrant=False) around a module with fully_shard=True runs it again amid its "
    "backward, where torch does not gather the weights of a call. Take use_reentrant=True, or let blocks be "
    "checkpointed: model.gradient_checkpointing_enable() before autotp.compile."
)
UNSUMMED = (
    "after backwards in no_sync() alone: their gradients are not summed over dp, and would be left out. Make the last "
    "backward outside of no_sync(), or drop them by zero_grad()."
)
CHANGED = (
    "gradients were changed in place while others of backwards in no_sync() wait for their sum, of which the change "
    "would leave out those. Change them after a backward outside of no_sync()."
)
_accumulating: weakref.WeakSet[ShardState] = weakref.WeakSet()  # in or after `no_sync`, before the sum
_roots: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that torch's data parallelism has been given


def spread(shards: ShardState, reads: Iterable[Read], reduces: torch.dtype | None) -> None:
    """Hand the weights of each repeated block that alone reads them, and then the rest, to torch's data parallelism.

    Args:
        shards: of the module. reads: which parameters its program reads, and where.
        reduces: type in which gradients are added up, over the axis and over backwards without `no_sync`'s end.
    """
    batch: Any = shards.ranks.batch
    units = {}
    for r in reads:
        if r.storage is not None and r.storage.owners == 1:  # stages of one rank may read a weight in several places
            units[r.name] = r.unit if units.get(r.name, r.unit) == r.unit else ""
    if shards.units:
        if name := next((n for n, unit in units.items() if shards.units.get(n, "") not in (unit, "")), ""):
            raise StateError(
                f"{name} is gathered with {shards.units[name]}, and for this call it is read outside of that. "
                "Compile with example_inputs like this call's."
            )
        return
    shards.units.update(units)
    # Of experts each rank has its own, with whole gradients.
    ignored = average_scalars(shards, nn.Module.parameters(shards.root))
    ignored |= {piece for name, piece, _ in shards.pieces() if shards.storages[name].owners > 1}
    apply: Any = fully_shard if shards.axis.fully_shard else compat.replicate
    policy = {} if reduces is None else {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduces)}
    for part in _units(shards):
        name = type(part).__name__
        apply(part, mesh=batch.mesh, ignored_params=ignored, **policy)
        type(part).__name__ = name  # by which transformers' Trainer knows a causal loss, and others their models
    remember(shards.root)


def forget(root: nn.Module) -> bool:
    """Note that torch's data parallelism no longer has a module; return whether it had it."""
    was = root in _roots
    _roots.discard(root)
    return was


def remember(root: nn.Module) -> None:
    """Note that torch's data parallelism was given a module."""
    _roots.add(root)


@contextlib.contextmanager
def own_after(shards: ShardState) -> Iterator[None]:
    """Gather weights anew for the call in this context, and give the module its own parameters back at its end.

    Torch does so at the end of a backward. Before that it would keep what it gathered in their place: `zero_grad`, an
    optimizer that is made and a norm would be of tensors without gradients, and the next forward of what was gathered
    before writes. For the backward to come the gathered weights stay in memory.

    Raises:
        StateError: the call is a recomputation, for which torch does not gather weights that are split over dp.
    """
    if shards.axis.fully_shard and isinstance(shards.root, FSDPModule) and compat.differentiates(shards.root):
        raise StateError(RECOMPUTED)
    if shards.by_torch.size == 1 or within():  # within `generate()`, say, it is done once, at the end
        yield
        return
    show_gradients(shards)
    yield
    if torch.is_grad_enabled():
        for part in _own_parts(shards):
            compat.show_own(part)
    else:
        show_gradients(shards)


def show_gradients(shards: ShardState) -> None:
    """Give the module the parameters that hold the gradients, in place of what torch gathered, and free that."""
    for part in _own_parts(shards):
        part.reshard()


@contextlib.contextmanager
def step(shards: ShardState) -> Iterator[None]:
    """Gather weights once for the forwards and backwards of a step, and sum gradients once, at its end."""
    parts = [*_own_parts(shards)]
    show_gradients(shards)
    for root in parts[-1:]:
        compat.outermost(root)
        root.unshard()  # what is read outside of the blocks, which gather theirs as they are called
    with recovering(shards), compat.at_once(parts):
        yield


@contextlib.contextmanager
def recovering(shards: ShardState) -> Iterator[None]:
    """Give the module its own parameters back, as they were before the forward in this context, where that fails."""
    try:
        yield
    except BaseException:
        if isinstance(shards.root, FSDPModule):
            compat.reset_iteration(shards.root)
        raise


def refuse_unsummed(shards: ShardState, what: str) -> None:
    """Refuse what would leave out gradients of backwards in `no_sync` that wait for their sum."""
    parts = [*_own_parts(shards)]
    for part in parts:
        compat.drop_unmarked(part)
    if any(map(compat.unsummed, parts)):
        raise StateError(f"{what} {UNSUMMED}")


@contextlib.contextmanager
def _backward() -> Iterator[None]:
    """Note after a backward what waits for its sum, and reset modules where it fails."""
    try:
        yield
    except BaseException:
        for root in list(_roots):
            compat.reset_iteration(root)
        raise
    finally:
        _note_waiting()


def _note_waiting() -> None:
    for shards in list(_accumulating):
        if compat.differentiates(shards.root):  # a backward within one, of a part that is recomputed
            continue
        parts = [*_own_parts(shards)]
        for part in parts:
            compat.mark_unsummed(part)
        if shards.summing and not any(map(compat.unsummed, parts)):
            _accumulating.discard(shards)


around_backwards.append(_backward)


def follow_types(shards: ShardState) -> None:
    """Take note of what `Module.to` made of the types of weights since the forward before."""
    for part in _own_parts(shards):
        compat.follow_types(part)


def _units(shards: ShardState) -> Iterator[nn.Module]:
    """Return the parts whose weights are gathered together, those of the rest last."""
    for path in dict.fromkeys(shards.units.values()):
        if path:
            yield shards.parts[path]
    yield shards.root


def _own_parts(shards: ShardState) -> Iterator[Any]:
    """Return the parts that this module has handed to torch's data parallelism."""
    yield from (part for part in _units(shards) if shards.by_torch.size > 1 and isinstance(part, FSDPModule))


def average_scalars(shards: ShardState, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Average over dp the gradients of scalars, which torch's data parallelism does not take; return these."""
    ranks = shards.ranks
    scalars = {p for p in parameters if p.ndim == 0}
    for p in scalars:
        if p.requires_grad and ranks.batch is not None and shards.by_torch.size > 1:
            p.register_post_accumulate_grad_hook(functools.partial(_average, shards, ranks.batch))
    return scalars


def _average(shards: ShardState, ranks: Ranks, parameter: Tensor) -> None:
    """Take the mean of a gradient over dp, in place; of one that is the mean already it is the same."""
    if shards.summing:
        grad: Any = parameter.grad
        dist.all_reduce(grad.to_local(), group=ranks.group)
        grad.to_local().div_(ranks.tp)


def refuse_another(shards: ShardState, hook: Any) -> None:
    """Refuse torch's data parallelism that a user is about to put around a part, where this module could not follow it.

    Args:
        shards: of the module. hook: of torch's own, that is registered on a part.
    """
    ours = shards.units and shards.root not in _roots  # handed over just now
    if ours or not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp"):
        return
    if shards.by_torch.size > 1:
        name = " and ".join(shards.axis.degrees)
        raise StateError(
            f"fully_shard or replicate around a module that divides the batch over {name} already. Leave out {name}, "
            f"or the wrapping; fully_shard=True splits weights over {name}."
        )
    if shards.staged:
        raise StateError(
            "fully_shard or replicate around a module in stages: torch would gather weights and sum gradients for each "
            "micro-batch, amid what stages send each other. Let the stages do it, once a step: "
            "autotp.stages(..., dp=2, fully_shard=True)."
        )


def begin_backward(shards: ShardState, outputs: Iterable[Any]) -> None:
    """Let a backward with dp of these outputs begin with what was to be dropped, and refuse to differentiate it."""
    for value in outputs if shards.by_torch.size > 1 else ():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.register_hook(functools.partial(_begin, shards))


def _begin(shards: ShardState, grad: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward: create_graph=True, by when torch has freed weights that it gathered
        raise StateError(
            "create_graph=True: with dp or cp a backward cannot be differentiated again, because torch's data "
            "parallelism keeps nothing for that. Compile over tp alone for gradients of gradients."
        )
    parts = [*_own_parts(shards)] if shards in _accumulating else []
    rewrites = [*map(compat.drop_unmarked, parts)]  # of all of them
    if any(rewrites):
        raise StateError(CHANGED)
    for part in parts:
        compat.unmark(part)


@contextlib.contextmanager
def no_sync(shards: ShardState) -> Iterator[None]:
    """Leave gradients unsummed over dp in this context; the next backward outside sums them all."""
    if shards.by_torch.size == 1:  # what virtual ranks have is summed by every backward
        yield
        return
    root: Any = shards.root
    shards.summing = False
    _accumulating.add(shards)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        shards.summing = True
        root.set_requires_gradient_sync(True)
