"""Gradients over more than one stage: of tied weights, and the norm of all of them."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.runtime import data_parallel
from autotp.runtime.interop.ownership import begin_step, end_step
from autotp.runtime.storage import ShardState


@dataclass
class Sums:
    """Sums of gradients over the ranks of a pipeline, once a step's backwards are done.

    Attributes:
        shards: what this rank holds.
        tied: first name of a parameter of this rank that several ranks of the pipeline hold -> all these.
        counted: names of the parameters that count on this rank in a norm: a tied one on one rank alone.
        pipeline: the group of this lane's ranks, one for each place in the pipeline.
        before: gradients that are summed already, while a step or backward is under way.
    """

    shards: ShardState
    tied: Mapping[str, tuple[int, ...]]
    counted: frozenset[str]
    pipeline: ProcessGroup
    before: dict[Tensor, Tensor | None] = field(default_factory=dict)

    def follow(self, schedule: Any) -> None:
        """Let every step of a schedule of torch's end with these sums, whoever calls it."""
        plain = schedule.step

        @functools.wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
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
        """Begin a step, or a backward: what one before has summed must not be summed again."""
        for p in self._parameters(self.tied):
            self.before[p], p.grad = p.grad, None

    def end(self) -> None:
        """Sum the gradients that came: they are then those of one device."""
        for name, holders in self.tied.items():
            for p in self._parameters({name}):
                self._sum(p, holders)
        for p, grad in self.before.items():
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        self.before.clear()

    @torch.no_grad()
    def _sum(self, parameter: nn.Parameter, holders: tuple[int, ...]) -> None:
        """The sum of a gradient over the ranks that hold the parameter; one that has none adds zero.

        Summed in one order on all of them, so that what is tied stays equal to the bit.
        """
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        # Sent rank to rank: a collective of the whole pipeline would need as much memory on ranks that hold none of it.
        own, me = compat.part_of(parameter.grad).contiguous(), dist.get_rank(self.pipeline)
        parts = {rank: torch.empty_like(own) for rank in holders if rank != me} | {me: own}
        ranks = dist.get_process_group_ranks(self.pipeline)
        others = [rank for rank in holders if rank != me]
        sends = [dist.P2POp(dist.isend, own, ranks[rank], self.pipeline) for rank in others]
        takes = [dist.P2POp(dist.irecv, parts[rank], ranks[rank], self.pipeline) for rank in others]
        for work in dist.batch_isend_irecv([*sends, *takes]):
            work.wait()
        # From the first holder to the last, on each: floating sums in another order would part in their last bits.
        total = parts[holders[0]].clone()
        for rank in holders[1:]:
            total.add_(parts[rank])
        compat.part_of(parameter.grad).copy_(total)

    def _parameters(self, names: Container[str]) -> Iterator[nn.Parameter]:
        """Return those that this rank keeps, also where others are gathered in their place."""
        yield from (p for name, p, _ in self.shards.counter.before_gathering or self.shards.pieces() if name in names)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most this; the norm before."""
        own = [p.grad for p in self._parameters(self.counted) if p.grad is not None]
        begin_step(self)  # all ranks are at it, and the norms of a stage are no mistake here
        norm: Any = torch.nn.utils.get_total_norm(own, norm_type) if own else torch.zeros((), device=self.shards.device)
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
