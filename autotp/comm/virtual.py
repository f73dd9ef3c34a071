"""Virtual ranks: a process runs the programs of several ranks in step, and sums over all are added along one tree.

A value that is the same on all virtual ranks of a process (an invariant one, and a replicated one without gradient) is
one tensor, and what is computed of such values alone is computed once. Any other is a `Virtual`. So a sum over ranks
adds the same numbers in the same order however many processes there are: a process sums the largest whole subtrees that
it has and sends these, and every process adds what it gets along the rest of the tree.

| primitive      | what is sent              | by                                    |
| -------------- | ------------------------- | ------------------------------------- |
| all_reduce     | sums of whole subtrees    | all-gather; of many numbers in slices, all-to-all, and an all-gather |
| reduce_scatter | slices of these           | all-to-all                            |
| all_gather     | what each virtual rank has | all-gather                           |
| all_to_all     | what each virtual rank has | all-to-all                           |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from . import collectives
from .collectives import Primitive

Subtree = tuple[int, int]  # the first of its leaves, and the one after its last
SENT: dict[Primitive, Primitive] = {
    "all_reduce": "all_gather",
    "reduce_scatter": "all_to_all",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
}
ALIGNED = 64  # bytes: the address of a tensor that owns its memory is a multiple of this
LARGE = 1 << 17  # bytes of a sum from which on each of several processes adds up a slice of it
SUMS = ("all_reduce", "reduce_scatter")
ADDS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


class Virtual:
    """A value of which each virtual rank of this process has its own on one axis, in their order.

    With several axes those of an outer one have what those of the next inner one have: a tensor, or a `Virtual` of it.
    """

    __slots__ = ("axis", "values")

    def __init__(self, values: Sequence[Any], axis: str = "tp") -> None:
        self.values, self.axis = values, axis


def values_of(x: Any, count: int, axis: str = "tp") -> list[Any]:
    """Return what each of `count` virtual ranks of an axis has of a value."""
    return list(x.values) if isinstance(x, Virtual) and x.axis == axis else [x] * count


def every(x: Any) -> list[Any]:
    """Return what all virtual ranks of all axes have of a value; one where they have the same."""
    if not isinstance(x, Virtual):
        return [x]
    return [y for value in x.values for y in every(value)]


class Deterministic:
    """Context in which kernels give the same bits at every run, where torch has such kernels."""

    def __init__(self) -> None:
        self.before: list[tuple[bool, bool]] = []

    def __enter__(self, *_: Any) -> None:
        on = torch.are_deterministic_algorithms_enabled()
        self.before.append((on, torch.is_deterministic_algorithms_warn_only_enabled()))
        torch.use_deterministic_algorithms(True, warn_only=not on)

    def __exit__(self, *_: Any) -> None:
        on, warns = self.before.pop()
        torch.use_deterministic_algorithms(on, warn_only=warns)


def aligned(x: Tensor) -> Tensor:
    """Return the tensor where its address is as aligned as a new tensor's, else a copy: kernels may depend on it."""
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


# ---- the tree --------------------------------------------------------------------------------------------------------


def middle(tree: Subtree) -> int:
    """Return where a tree of several leaves divides: after the largest power of two that is below their number."""
    first, last = tree
    return first + (1 << (last - first - 1).bit_length() - 1)


def subtrees(first: int, last: int, tree: Subtree) -> list[Subtree]:
    """Return the largest parts of a tree all of whose leaves are among those from `first` to before `last`."""
    if last <= tree[0] or tree[1] <= first:
        return []
    if first <= tree[0] and tree[1] <= last:
        return [tree]
    at = middle(tree)
    return subtrees(first, last, (tree[0], at)) + subtrees(first, last, (at, tree[1]))


def total(parts: Mapping[Subtree, Tensor], tree: Subtree, reduction: str) -> Tensor:
    """Add up along a tree.

    Args:
        parts: sums of subtrees that make it up. tree: the whole. reduction: "sum" or "max".
    """
    if tree in parts:
        return parts[tree]
    halves = (tree[0], middle(tree)), (middle(tree), tree[1])
    left, right = (total(parts, half, reduction) for half in halves)
    return ADDS[reduction](left, right, out=None if halves[0] in parts else left)  # in place, in a sum made here


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A process and the virtual ranks that it runs on one axis.

    Attributes:
        first: of its virtual ranks, and `local` how many follow each other from there. size: how many there are in all.
        group: name of the process group of those that share them; nothing where there is one. axis: its name.
    """

    first: int
    local: int
    size: int
    group: str = ""
    axis: str = "tp"

    @property
    def here(self) -> range:
        """Numbers of the virtual ranks that run here."""
        return range(self.first, self.first + self.local)

    @cached_property
    def subtrees(self) -> list[list[Subtree]]:
        """Subtrees whose sums each process sends; every sum reads them twice."""
        firsts = range(0, self.size, self.local)
        return [subtrees(first, first + self.local, (0, self.size)) for first in firsts]

    def traffic(self, primitive: str, nbytes: float) -> float:
        """Return the bytes that a process sends.

        Args:
            primitive: of the collective. nbytes: of the whole value.
        """
        hosts, parts = self.size // self.local, max(map(len, self.subtrees))
        if primitive == "all_reduce" and hosts > 2 and nbytes >= LARGE:
            return (parts + 1) * nbytes * (hosts - 1) / hosts
        part = parts if primitive in SUMS else self.local / self.size
        return part * nbytes * (hosts - 1) / (1 if SENT[primitive] == "all_gather" else hosts)  # type: ignore[index]

    def exchange(self, primitive: Primitive, xs: Sequence[Tensor], reduction: str) -> list[Tensor]:
        """Return what a primitive gives each virtual rank here.

        Args:
            primitive: of the collective. xs: each virtual rank's operand. reduction: "sum" or "max".
        """
        kind, hosts = SENT[primitive], self.size // self.local
        if primitive == "all_reduce" and hosts > 2 and xs[0].nbytes >= LARGE:
            return [self._in_slices(xs, reduction, hosts)] * self.local
        y = self.send(primitive, xs, reduction)
        if hosts > 1:
            y = collectives.real(kind, y, reduction, tp=hosts, group=self.group)
        elif kind == "all_gather":
            y = y.unsqueeze(0)
        return self.receive(primitive, y, reduction)

    def send(self, primitive: Primitive, xs: Sequence[Tensor], reduction: str) -> Tensor:
        """Return what this process sends.

        Args:
            primitive: of the collective. xs: each virtual rank's operand. reduction: "sum" or "max".

        Returns: [parts, ...] for a gather, [hosts, parts, local, ...] for an exchange.
        """
        stack = self._parts(xs, reduction) if primitive in SUMS else torch.stack(list(xs))
        if SENT[primitive] == "all_gather":
            return stack
        return stack.unflatten(1, (-1, self.local)).movedim(1, 0).contiguous()

    def receive(self, primitive: Primitive, y: Tensor, reduction: str) -> list[Tensor]:
        """Return what each virtual rank here gets: of parts from every process, [hosts, parts, ...]."""
        if primitive == "all_gather":
            return [y.flatten(0, 1)] * self.local
        if primitive == "all_to_all":
            return [x.contiguous() for x in y.flatten(0, 1).unbind(1)]
        result = self._whole(y, reduction)
        return [result] * self.local if primitive == "all_reduce" else list(result.unbind(0))

    def _parts(self, xs: Sequence[Tensor], reduction: str) -> Tensor:
        """Compute the sums that this process sends, [parts, ...]; zeros make up the same number on all processes."""
        leaves = {(v, v + 1): x for v, x in zip(self.here, xs, strict=True)}
        parts = [total(leaves, tree, reduction) for tree in self.subtrees[self.first // self.local]]
        missing = max(map(len, self.subtrees)) - len(parts)
        if len(parts) == 1 and not missing:
            return parts[0].unsqueeze(0)
        return torch.stack([*parts, *[torch.zeros_like(parts[0])] * missing])

    def _whole(self, y: Tensor, reduction: str) -> Tensor:
        """Add up what all processes have sent, [hosts, parts, ...], along the rest of the tree."""
        sums = {tree: y[i, j] for i, trees in enumerate(self.subtrees) for j, tree in enumerate(trees)}
        return total(sums, (0, self.size), reduction)

    def _in_slices(self, xs: Sequence[Tensor], reduction: str, hosts: int) -> Tensor:
        """Add up with each process a slice of the sum, which all gather: about the bytes of a ring."""
        parts, shape = self._parts(xs, reduction).flatten(1), xs[0].shape
        size = -(-shape.numel() // hosts)
        padded = torch.nn.functional.pad(parts, (0, size * hosts - shape.numel())).unflatten(1, (hosts, size))
        y = collectives.real("all_to_all", padded.movedim(1, 0), reduction, tp=hosts, group=self.group)
        piece = self._whole(y, reduction)
        whole = collectives.real("all_gather", piece, reduction, tp=hosts, group=self.group)
        return whole.flatten()[: shape.numel()].view(shape)


@dataclass(frozen=True)
class AllHosts:
    """All processes at once, simulated in one.

    Attributes:
        size, local: as of each `Host`.
    """

    size: int
    local: int = 1

    @property
    def here(self) -> range:
        """All virtual ranks."""
        return range(self.size)

    @cached_property
    def hosts(self) -> list[Host]:
        """All of the processes, in order."""
        return [Host(first, self.local, self.size) for first in range(0, self.size, self.local)]

    def exchange(self, primitive: Primitive, xs: Sequence[Tensor], reduction: str) -> list[Tensor]:
        """Return what a primitive gives every virtual rank; arguments as of `Host.exchange`."""
        operands = [host.send(primitive, xs[host.first : host.first + self.local], reduction) for host in self.hosts]
        results: list[Tensor] = []
        for host, y in zip(self.hosts, collectives.simulated(SENT[primitive], operands), strict=True):
            results += host.receive(primitive, y, reduction)
        return results


def of_groups(primitive: Primitive, everyone: Sequence[Tensor], ranks: Sequence[int], copies: int) -> list[Tensor]:
    """Return what each of these ranks gets, where groups of so many gather, or scatter a sum, each for itself.

    Args:
        primitive: of the collective. everyone: for each of the ranks the operands of all, [tp, ...].
        ranks: that are here. copies: ranks of a group.
    """
    out = []
    for rank, operands in zip(ranks, everyone, strict=True):
        first = rank // copies * copies
        result = operands[first : first + copies]
        if primitive != "all_gather":
            parts = {(i, i + 1): result[i, rank - first] for i in range(copies)}
            result = total(parts, (0, copies), "sum")
        out.append(result)
    return out


# ---- programs --------------------------------------------------------------------------------------------------------

Hosts = Sequence[Host]  # a process on each axis, the outermost first, tp last


def on_all(
    call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], hosts: Hosts, axis: str | None = None,
    draws: bool = False,
) -> Any:  # fmt: skip
    """Run one operator for the virtual ranks of a process.

    Args:
        call: the operator. args, kwargs: its arguments, with a `Virtual` where each virtual rank has its own value.
        hosts: the process. axis: the axis whose rank and size the operator takes as arguments.
        draws: whether it draws random numbers, which are the same for all.

    Returns: one result where all have the same operands, else a `Virtual`.
    """
    outer = next((i for i, x in enumerate(hosts) if x.axis == axis or _differs(args, kwargs, x.axis)), None)
    if outer is None:
        return call(*args, **kwargs)
    host, inner = hosts[outer], hosts[outer + 1 :]
    state, results = torch.get_rng_state() if draws else None, []
    for at, rank in enumerate(host.here):
        if state is not None:  # the generators of all ranks are in the same state
            torch.set_rng_state(state)
        place = {"rank": rank, "tp": host.size} if host.axis == axis else {}
        operands, options = at_rank(args, at, host.axis), {**at_rank(dict(kwargs), at, host.axis), **place}
        results.append(on_all(call, operands, options, inner, axis, draws) if inner else call(*operands, **options))
    # A size that all have alike is one: what is whole on every rank is computed once with it too.
    alike = isinstance(results[0], int | float) and results.count(results[0]) == host.local
    return results[0] if alike or host.local == 1 else Virtual(results, host.axis)


def at_rank(args: Any, at: int, axis: str = "tp") -> Any:
    """Return arguments as the virtual rank in this place of its process, on an axis, has them."""

    def local(x: Any) -> Any:
        return x.values[at] if isinstance(x, Virtual) and x.axis == axis else x

    return map_aggregate(args, local)


def _differs(args: Any, kwargs: Any, axis: str) -> bool:
    """Return whether virtual ranks of an axis have values of their own among these arguments."""
    todo = [*args, *kwargs.values()]
    while todo:
        x = todo.pop()
        if isinstance(x, Virtual) and x.axis == axis:
            return True
        if isinstance(x, list | tuple):
            todo += x
    return False
