"""Layouts at run time: one NamedTuple for each kind, with what a rank does with a tensor in this layout.

They are literal arguments in a torch.fx graph, and Dynamo traces their methods. The numbers are those of the layout
as ints or `torch.SymInt`. The last element of each tuple is the kind's mark, so that `==` is right. `whole`: every rank
holds the whole value. `sharded_dim`: the dimension of which a rank holds a slice. `split` cuts a whole into what each
rank holds, where summands are pseudo-random, drawn with a seed; `recombine` undoes it. `owned` zeroes what of a rank's
tensor no reader may use.

Uneven shares are padded **per segment** to the largest share, so that all ranks send and get equally much; what the
padding holds is read by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.errors import PlanError

from . import windows
from .windows import Segments


class InvariantSpec(NamedTuple):
    """`layouts.Invariant`."""

    mark: str = "I"
    whole = True
    dim = sharded_dim = None
    reduction = "sum"

    @property
    def dual(self) -> Spec:
        return self

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return x

    owned = take

    def split(self, x: Tensor, tp: int, seed: int = 0) -> list[Tensor]:
        return [x] * tp

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        return xs[0]


class ReplicateSpec(NamedTuple):
    """`layouts.Replicate`."""

    mark: str = "R"
    whole = True
    dim = sharded_dim = None
    reduction = "sum"

    @property
    def dual(self) -> Spec:
        return SUMMANDS

    take = owned = InvariantSpec.take
    split, recombine = InvariantSpec.split, InvariantSpec.recombine


class ReplicateMaxSpec(NamedTuple):
    """`layouts.Replicate` whose gradients are reduced by maximum."""

    gradients: str = "max"
    mark: str = "R"
    whole = True
    dim = sharded_dim = None
    reduction = "sum"

    @property
    def dual(self) -> Spec:
        return PartialSpec(self.gradients)

    take = owned = InvariantSpec.take
    split, recombine = InvariantSpec.split, InvariantSpec.recombine


class PartialSpec(NamedTuple):
    """`layouts.Partial`."""

    reduction: str = "sum"
    mark: str = "P"
    whole = False
    dim = sharded_dim = None

    @property
    def dual(self) -> Spec:
        """Layout R.

        Raises:
            PlanError: of a maximum, whose gradient has no layout.
        """
        if self.reduction != "sum":
            raise PlanError(
                f"A gradient arrived at a Partial {self.reduction}, which has none: only values that need no gradient "
                "(the maximum inside a softmax) may be laid out so. Detach the value, or plan it without this layout."
            )
        return REPLICATED

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Return the value on rank 0, zeros elsewhere: summands that add up to it."""
        return x.view_as(x) if rank == 0 else torch.zeros_like(x)

    def owned(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return x

    def split(self, x: Tensor, tp: int, seed: int = 0) -> list[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randint(1, 4, (tp - 1, *x.shape), generator=draw).to(x.device, x.dtype)
        if self.reduction == "max":
            return [x, *(x - n for n in noise)]
        return [x - noise.sum(0, dtype=x.dtype), *noise]

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add if self.reduction == "sum" else torch.maximum, xs)


class ShardSpec(NamedTuple):
    """`layouts.Shard`: `dim` is `repeat` runs of `segments`, (count, unit) each."""

    dim: int
    repeat: int
    segments: Segments
    mark: str = "S"
    whole = False
    reduction = "sum"
    dual, owned = InvariantSpec.dual, PartialSpec.owned

    @property
    def sharded_dim(self) -> int | None:
        return self.dim

    @property
    def plain(self) -> bool:
        """Say whether ranks own one run each, in their order."""
        return self.repeat == 1 and len(self.segments) == 1 and len(self.segments[0]) == 2

    def lengths(self, tp: int) -> list[int]:
        """Count the elements along the dimension that each rank owns."""
        return [Runs(self.repeat, self.segments).local(rank, tp) for rank in range(tp)]

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        dim, repeat, segments, _ = self
        mine = windows.shares(segments, rank, tp)
        return windows.window(x, dim, repeat, windows.lengths(segments), mine).contiguous()

    def place(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Return the whole tensor with `rank`'s slice `x` in its places and zeros elsewhere."""
        dim, repeat, segments, _ = self
        mine, whole = windows.shares(segments, rank, tp), windows.lengths(segments)
        want = [(-start, length) for (start, _), length in zip(mine, whole, strict=True)]
        return windows.window(x, dim, repeat, [n for _, n in mine], want)

    def pad(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Pad every share of `rank`'s slice `x` with zeros to the largest: the same size on all ranks."""
        dim, repeat, segments, _ = self
        if share := windows.even_share(repeat, segments, tp):
            return windows.checked(x, dim, 1, [share])
        largest = [(0, n) for n in windows.most(segments, tp)]
        return windows.window(x, dim, repeat, [n for _, n in windows.shares(segments, rank, tp)], largest)

    def trim(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Undo `pad`."""
        dim, repeat, segments, _ = self
        if share := windows.even_share(repeat, segments, tp):
            return windows.checked(x, dim, 1, [share]).contiguous()
        mine = [(0, n) for _, n in windows.shares(segments, rank, tp)]
        return windows.window(x, dim, repeat, windows.most(segments, tp), mine).contiguous()

    def deal(self, x: Tensor, tp: int) -> Tensor:
        """Stack the padded slices of the whole `x` of all ranks on a new first dimension of size `tp`."""
        dim, repeat, segments, _ = self
        if share := windows.even_share(repeat, segments, tp):
            x = windows.checked(x, dim, 1, [tp * share])
            return x.unflatten(dim, (tp, share)).movedim(dim, 0).contiguous()
        most, whole, parts = windows.most(segments, tp), windows.lengths(segments), []
        for rank in range(tp):  # as long as the largest: the next rank's elements, or zeros, are the padding
            starts = [start for start, _ in windows.shares(segments, rank, tp)]
            parts.append(windows.window(x, dim, repeat, whole, list(zip(starts, most, strict=True))))
        return torch.stack(parts)

    def collect(self, stack: Tensor, tp: int) -> Tensor:
        """Undo `deal`: join the stacked padded slices to the whole tensor."""
        dim, repeat, segments, _ = self
        if share := windows.even_share(repeat, segments, tp):
            return windows.checked(stack, dim + 1, 1, [share]).movedim(0, dim).flatten(dim, dim + 1).contiguous()
        most = windows.most(segments, tp)
        runs = stack.unflatten(dim + 1, (repeat, sum(most))).unbind(0)
        shares = [windows.shares(segments, rank, tp) for rank in range(tp)]
        parts: list[Tensor] = []
        at = 0
        for i, (n, segment) in enumerate(zip(most, segments, strict=True)):
            for rank in reversed(range(tp)) if segment[2:] == (True,) else range(tp):
                parts.append(runs[rank].narrow(dim + 1, at, shares[rank][i][1]))
            at += n
        return torch.cat(parts, dim + 1).flatten(dim, dim + 1)

    def split(self, x: Tensor, tp: int, seed: int = 0) -> list[Tensor]:
        return [self.take(x, rank, tp) for rank in range(tp)]

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        tp = len(xs)
        return self.collect(torch.stack([self.pad(x, rank, tp) for rank, x in enumerate(xs)]), tp)


class GroupedSpec(NamedTuple):
    """`layouts.Grouped`: groups are sharded by `segments`; `ends` is the tensor of the row after each group's last."""

    dim: int
    ends: Tensor
    segments: Segments
    mark: str = "G"
    whole = False
    sharded_dim = None
    reduction = "sum"
    dual, split = InvariantSpec.dual, ShardSpec.split

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Return all rows of `x` in their places, zeros for those of groups that `rank` does not own."""
        ((start, length),) = windows.shares(self.segments, rank, tp)
        bounds = torch.cat([self.ends.new_zeros(1), self.ends])
        rows = torch.arange(x.shape[self.dim], device=x.device)
        mine = (rows >= bounds[start]) & (rows < bounds[start + length])
        return torch.where(mine.view(-1, *[1] * (x.ndim - self.dim - 1)), x, x.new_zeros(()))

    owned = place = take  # a rank's rows are in their places already

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, [self.take(x, rank, len(xs)) for rank, x in enumerate(xs)])


class TravelledSpec(NamedTuple):
    """`layouts.Travelled`: groups are sharded by `segments`; `counts` has each rank's rows of each group, on the CPU.

    The rows that a rank sends are sorted by group, so that each rank's groups are consecutive. Those that it gets it
    sorts by group too, and within a group by sender. Where `copies` ranks that follow each other have the same groups,
    each of them gets the rows of the ranks that have its own index among their copies.
    """

    dim: int
    counts: Tensor
    segments: Segments
    copies: int = 1
    mark: str = "T"
    whole = False
    sharded_dim = None
    reduction = "sum"
    dual = InvariantSpec.dual

    def rows(self, rank: int, tp: int) -> tuple[list[int], list[int]]:
        """Return the counts of rows that this rank sends to each and gets from each; nothing for meta counts."""
        if self.counts.is_meta:
            return [], []
        place, sends, gets = rank % self.copies, [0] * tp, [0] * tp
        for peer in range(place, tp, self.copies):
            sends[peer] = int(self.of_owner(peer, tp)[rank // self.copies].sum())
        gets[place :: self.copies] = self.of_owner(rank, tp).sum(1).tolist()
        return sends, gets

    def of_owner(self, rank: int, tp: int) -> Tensor:
        """Return the counts of rows of a rank's groups on each rank that sends to it, [senders, groups]."""
        ((start, n),) = windows.shares(self.segments, rank // self.copies, tp // self.copies)
        return self.counts[rank % self.copies :: self.copies, start : start + n]

    def order(self, rank: int, tp: int) -> Tensor:
        """Return the permutation that sorts rows from senders' order to groups' order."""
        counts = self.of_owner(rank, tp)
        groups = torch.arange(counts.shape[1]).repeat(len(counts))
        return groups.repeat_interleave(counts.flatten()).argsort(stable=True)

    def trim(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Sort rows by group that came in the order of their senders."""
        return x if x.is_meta else x.index_select(0, self.order(rank, tp).to(x.device))

    def place(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Undo `trim`."""
        return x if x.is_meta else x.index_select(0, self.order(rank, tp).argsort().to(x.device))


class CopiedSpec(NamedTuple):
    """`layouts.Copied`: `copies` ranks that follow each other have one slice of `dim`, sharded over groups of ranks.

    The ranks of a group may also have parts of the slice, one after the other, as `parts` shards it.
    """

    dim: int
    repeat: int
    segments: Segments
    copies: int
    mark: str = "C"
    whole = False
    reduction = "sum"
    sharded_dim, owned, split = ShardSpec.sharded_dim, PartialSpec.owned, ShardSpec.split

    @property
    def dual(self) -> Spec:
        return SummedSpec(*self[:-1])

    @property
    def over_groups(self) -> ShardSpec:
        """Shard over the groups, and not the ranks."""
        return ShardSpec(self.dim, self.repeat, self.segments)

    @property
    def parts(self) -> ShardSpec:
        """Shard of a group's slice over its ranks."""
        return ShardSpec(self.dim, self.repeat, tuple((self.copies, n // self.copies) for _, n, *_ in self.segments))

    def holds(self, fine: ShardSpec) -> bool:
        """Say whether a shard distributes every slice over its group as `parts` does."""
        if (self.dim, self.repeat, len(self.segments)) != (fine.dim, fine.repeat, len(fine.segments)):
            return False
        parts = [(count * self.copies, unit / self.copies) for count, unit, *_ in self.segments]
        return parts == [*fine.segments]

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.over_groups.take(x, rank // self.copies, tp // self.copies)

    def place(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.over_groups.place(x, rank // self.copies, tp // self.copies)

    def pad(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.over_groups.pad(x, rank // self.copies, tp // self.copies)

    def trim(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return self.over_groups.trim(x, rank // self.copies, tp // self.copies)

    def collect(self, stack: Tensor, tp: int) -> Tensor:
        """Join the stacked padded slices of all ranks to the whole tensor."""
        return self.over_groups.collect(stack[:: self.copies], tp // self.copies)

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        return self.over_groups.recombine(xs[:: self.copies])


class SummedSpec(NamedTuple):
    """`layouts.Summed`: one summand of a slice on each rank of its group."""

    dim: int
    repeat: int
    segments: Segments
    copies: int
    mark: str = "D"
    whole = False
    reduction = "sum"
    sharded_dim = ShardSpec.sharded_dim
    over_groups, parts, holds = CopiedSpec.over_groups, CopiedSpec.parts, CopiedSpec.holds
    owned, place, pad, trim = CopiedSpec.owned, CopiedSpec.place, CopiedSpec.pad, CopiedSpec.trim

    @property
    def dual(self) -> Spec:
        return CopiedSpec(*self[:-1])

    def take(self, x: Tensor, rank: int, tp: int) -> Tensor:
        """Return the slice on the first rank of a group, zeros on the others."""
        whole = self.over_groups.take(x, rank // self.copies, tp // self.copies)
        return SUMMANDS.take(whole, rank % self.copies, self.copies)

    def split(self, x: Tensor, tp: int, seed: int = 0) -> list[Tensor]:
        slices = self.over_groups.split(x, tp // self.copies)
        return [y for i, whole in enumerate(slices) for y in SUMMANDS.split(whole, self.copies, seed + i)]

    def recombine(self, xs: Sequence[Tensor]) -> Tensor:
        sums = [SUMMANDS.recombine(xs[i : i + self.copies]) for i in range(0, len(xs), self.copies)]
        return self.over_groups.recombine(sums)


def rows_by_rank(src: Any, dst: Any, rank: int, tp: int) -> tuple[list[int], list[int]]:
    """Return the counts of rows that a rank sends to each and gets from each, where they travel."""
    if isinstance(dst, TravelledSpec):
        return dst.rows(rank, tp)
    gets, sends = src.rows(rank, tp)
    return sends, gets


Copies = CopiedSpec | SummedSpec
Spec = Copies | InvariantSpec | ReplicateSpec | ReplicateMaxSpec | PartialSpec | ShardSpec | GroupedSpec
INVARIANT: Spec = InvariantSpec()
REPLICATED: Spec = ReplicateSpec()
SUMMANDS: Spec = PartialSpec()


# ---- runs ------------------------------------------------------------------------------------------------------------

# The distribution of a dimension over the ranks, as a call of a rank's program takes it.


class Runs(NamedTuple):
    """A dimension that is `repeat` runs of `segments`, as in `windows`; a rank owns its share of every segment.

    The run-time form of `partitions.Partition`. Numbers are ints, `torch.SymInt` while a program is traced, and while
    one is written the nodes that compute them.
    """

    repeat: int
    segments: Segments

    @property
    def length(self) -> int:
        """Elements of the whole dimension."""
        return self.repeat * sum(windows.lengths(self.segments))

    def local(self, rank: int, tp: int) -> int:
        """Count the elements that `rank` owns."""
        return self.repeat * sum(length for _, length in windows.shares(self.segments, rank, tp))

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        """List the (offset, length) runs that `rank` owns, in order; in elements.

        Example:
            >>> Runs(1, ((4, 2), (2, 1))).spans(1, 2)
            [(4, 4), (9, 1)]
        """
        out, at = [], 0
        for _ in range(self.repeat):
            for (start, n), whole in zip(
                windows.shares(self.segments, rank, tp), windows.lengths(self.segments), strict=True
            ):
                out.append((at + start, n))
                at += whole
        return out

    def __repr__(self) -> str:
        return repr(tuple(self))


class CopiedRuns(NamedTuple):
    """The run-time form of `partitions.Copies`: `Runs` over groups of `copies` ranks, which have the same elements."""

    repeat: int
    segments: Segments
    copies: int

    @property
    def length(self) -> int:
        return Runs(self.repeat, self.segments).length

    def local(self, rank: int, tp: int) -> int:
        return Runs(self.repeat, self.segments).local(rank // self.copies, tp // self.copies)

    def spans(self, rank: int, tp: int) -> list[tuple[int, int]]:
        return Runs(self.repeat, self.segments).spans(rank // self.copies, tp // self.copies)
