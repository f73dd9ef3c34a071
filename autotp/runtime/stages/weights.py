"""Weights of pipeline stages: initialised as those of the whole model, and kept in their types.

A weight that several stages hold gets the sum of their gradients, and is equal on all of them to the bit: a few values
of it go with every call's message, for tied weights differ once one stage is updated otherwise than another. A norm is
of all stages.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.capture.copies import copied
from autotp.comm.channel import by_value
from autotp.comm.lockstep import CAUSES
from autotp.errors import RankError, StateError
from autotp.runtime import data_parallel, state
from autotp.runtime.call_message import (
    SAMPLED,
    UNCHECKED,
    differ,
    few,
    refuse_samples,
    sampled,
)
from autotp.runtime.interop.ownership import begin_step, drawing_all, end_step
from autotp.runtime.storage import ShardState, memory_like


def refuse_types(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion to another dtype, for stages exchange values of the dtypes that they were made for.

    Args:
        module: the sharded module. fn: of each tensor.

    Raises:
        StateError: it says what to convert instead.
    """
    for dtype in {p.dtype for p in module.parameters()}:
        to = fn(torch.empty(0, dtype=dtype, device=module._shards.device)).dtype
        if to != dtype:
            raise StateError(f"the stages were made for {dtype}: convert the model to {to}, and make them of that.")


def applied(module: Any, fn: Callable[[nn.Module], Any]) -> Any:
    """Apply a function as on the whole model: random numbers of other stages are drawn here too, and dropped.

    So each block gets numbers of its own, and a tied weight the same ones on every stage that holds it.

    Args:
        module: the sharded module, which is returned. fn: of each of its modules.
    """
    shards = module._shards
    # Under each of its names: a tied head is a module too.
    homes = _homes(name for name in shards.aliases if name not in shards.elsewhere)
    absent = _homes(shards.elsewhere) - homes

    def visit(original: nn.Module, path: str) -> None:
        if path in absent:
            copied(original, partial(memory_like, device=shards.device)).apply(fn)
            return
        for name, child in original.named_children():
            visit(child, f"{path}.{name}" if path else name)
        fn(shards.parts[path])

    with drawing_all():
        visit(shards.bare, "")
    return module


def _homes(names: Iterable[str]) -> set[str]:
    """Return the paths of the modules that hold tensors of these names, and of those around them."""
    homes = {""}
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in homes:
            homes.add(path)
            path = path.rpartition(".")[0]
    return homes


MAX_TIED = 64  # tied weights of which values are compared: a message has a largest length
UPDATED_APART = (
    "Usual causes: another learning rate on one stage; weights that are initialised or written on one stage. Load a "
    "checkpoint, or make the stages again. What is not to be trained has requires_grad_(False)."
)


@dataclass
class Tied:
    """The weights that several ranks of a pipeline hold: their gradients are summed once a step's backwards are done.

    Attributes:
        shards: of this rank. holders: first name of each -> places in the pipeline that hold it.
        pipeline: the group of this lane's ranks, one for each place. size: number of ranks of one place.
        before: gradients that are summed already, while a step or backward is under way.
    """

    shards: ShardState
    holders: Mapping[str, tuple[int, ...]]
    pipeline: ProcessGroup
    size: int
    before: dict[Tensor, Tensor | None] = field(default_factory=dict)

    def follow(self, schedule: Any) -> None:
        """Let every step of a schedule of torch's end with these sums, also where the user calls it."""
        plain, trains = schedule.step, None

        @functools.wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal trains
            trains = schedule._has_backward if trains is None else trains
            if schedule._has_backward and not trains and compat.VERSION < (2, 12):
                raise StateError(
                    f"this schedule began with an evaluation, and torch {torch.__version__} can make no step of it "
                    "then. Make another for steps: pipe.schedule(...)."
                )
            with data_parallel.step(self.shards):
                if not schedule._has_backward:
                    with torch.no_grad():
                        return plain(*args, **kwargs)
                self.begin()
                result = plain(*args, **kwargs)
            self.end()
            return result

        schedule.step = step

    def begin(self) -> None:
        """Begin a step, or a backward: gradients that were summed before must not be summed again."""
        for p in self._parameters(self.holders):
            self.before[p], p.grad = p.grad, None

    def end(self) -> None:
        """Sum the new gradients: they are then those of one device."""
        for name, places in self.holders.items():
            for p in self._parameters({name}):
                self._sum(p, places)
        for p, grad in self.before.items():
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        self.before.clear()

    @torch.no_grad()
    def _sum(self, parameter: nn.Parameter, holders: tuple[int, ...]) -> None:
        """Sum a gradient over the ranks that hold the parameter; one without a gradient adds zero.

        The order is the same on all of them, so that tied weights stay equal to the bit.
        """
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # Sent rank to rank: a collective of the whole pipeline would need as much memory on ranks that hold none of it.
        grad, me = compat.part_of(parameter.grad).contiguous(), dist.get_rank(self.pipeline)
        others = [rank for rank in holders if rank != me]
        parts = {rank: torch.empty_like(grad) for rank in others} | {me: grad}
        sends = [dist.P2POp(dist.isend, grad, group=self.pipeline, group_peer=rank) for rank in others]
        takes = [dist.P2POp(dist.irecv, parts[rank], group=self.pipeline, group_peer=rank) for rank in others]
        for work in dist.batch_isend_irecv([*sends, *takes]):
            work.wait()
        # From the first holder to the last, on each: floating sums in another order would differ in their last bits.
        total = parts[holders[0]].clone()
        for rank in holders[1:]:
            total.add_(parts[rank])
        compat.part_of(parameter.grad).copy_(total)

    def _parameters(self, names: Container[str]) -> Iterator[nn.Parameter]:
        """Return the parameters that this rank keeps, also while gathered ones are in their place."""
        yield from (p for name, p, _ in self.shards.counter.before_gathering or self.shards.pieces() if name in names)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most this; return the norm before."""
        # A weight of several stages has one gradient, their sum, and counts once: at its first holder.
        me = dist.get_rank(self.pipeline)
        counted = self.shards.storages.keys() - {name for name, places in self.holders.items() if places[0] != me}
        grads = [p.grad for p in self._parameters(counted) if p.grad is not None]
        begin_step()  # all ranks are at it, and the norms of a stage are no mistake here
        norm: Any = (
            torch.nn.utils.get_total_norm(grads, norm_type) if grads else torch.zeros((), device=self.shards.device)
        )
        end_step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # In one type on all stages, which may have gradients of different types, or none: collectives of two abort.
        total, kind = norm.double(), norm.dtype
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.pipeline)
        else:
            total = total**norm_type
            dist.all_reduce(total, group=self.pipeline)
            total = total ** (1 / norm_type)
        norm = total.to(kind)
        torch.nn.utils.clip_grads_with_norm_(nn.Module.parameters(self.shards.root), max_norm, norm)
        return norm

    def values(self, target: Any, values: bool) -> bytes:
        """Return a few values of each weight, and of a step's target, as bytes; of both none without `values`."""
        sample = sampled([target]) if values and isinstance(target, Tensor) else None
        texts = []
        for name in islice(self.holders, MAX_TIED) if values else ():
            pieces = state.pieces(self.shards, name) if name in self.shards.storages else []
            texts.append("".join(few(compat.part_of(p)) for p in pieces))
        return pickle.dumps((sample, texts))

    def compare(self, everyone: Sequence[bytes], what: str, slices: Sequence[Sequence[int]]) -> None:
        """Refuse tied weights, and targets, that differ.

        Args:
            everyone: what `values` gave on each rank, in the order of the mesh. what: begins, in words.
            slices: ranks that are given the same values.

        Raises:
            RankError: with what differs.
        """
        samples, of_ranks = zip(*map(pickle.loads, everyone), strict=True)
        # A tied weight is split alike on every stage that holds it: ranks of one seat have the same part of it.
        for name, places, *texts in zip(self.holders, self.holders.values(), *of_ranks, strict=False):
            ranks = [r for r in range(len(everyone)) if r // self.size in places]
            if differ(texts, [ranks[seat :: self.size] for seat in range(self.size)]):
                for r in {*range(len(everyone))} - {*ranks}:
                    texts[r] = "-"
                head = f"At {what}, the stages that share {name} have other values of it (a few were compared)"
                raise RankError(f"{head}: {by_value(texts)}.\n{UPDATED_APART}")
        for group in slices:
            head = f"The ranks do not agree on the values of the target of {what} {SAMPLED}"
            targets = [samples[r] for r in group if samples[r] is not None]
            refuse_samples(targets, head, f"{CAUSES} {UNCHECKED}")
