"""An output that stays split over its last dimension and is gathered where it is read, such as the logits of a step.

What selects rows, casts or copies acts on this rank's columns; of an argmax over them the ranks exchange the largest
value and its place alone. Every other function gathers the whole, once, and goes on with an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.comm import collectives
from autotp.comm.conversions import function_for
from autotp.comm.ranks import Ranks
from autotp.ir.carried import is_carrier
from autotp.ir.graph import Capture
from autotp.ir.layouts import Shard
from autotp.ir.program import Sharded
from autotp.ir.specs import INVARIANT, ShardSpec

Turn = Callable[[str], AbstractContextManager[None]]  # in which the ranks agree on what they are about to do


class Columns(NamedTuple):
    """Which part of the last dimension a rank holds.

    Attributes:
        spec: how it is dealt: one slice for each rank, in their order. first, length: of this rank's, and of the whole.
        ranks: this rank and the others.
        wire: a narrower type that holds the same numbers, in which they are sent; None for their own.
    """

    spec: ShardSpec
    first: int
    length: int
    ranks: Ranks
    wire: torch.dtype | None = None

    @classmethod
    def of(cls, layout: Shard, ranks: Ranks) -> Columns:
        """Of a value that lies so, which is plain."""
        spec: Any = layout.to_runtime()
        first = sum(int(layout.partition.local(rank, ranks.tp)) for rank in range(ranks.rank))
        return cls(spec, first, int(layout.partition.length), ranks)

    def output(self, local: Tensor, turn: Turn) -> Tensor:
        """An output of the program as it is, to be read in a later turn of the ranks; with gradients whole.

        Args:
            local: this rank's columns. turn: of the later collective.
        """
        return self.whole(local) if local.requires_grad else Deferred(local, self, turn)

    def cast(self, before: torch.dtype, after: torch.dtype) -> Columns:
        """Of the same numbers in another type."""
        narrow = self.wire or before
        exact = narrow != after and torch.promote_types(narrow, after) == after
        return self._replace(wire=narrow if exact else None)

    def whole(self, local: Tensor) -> Tensor:
        """The whole value from every rank's columns. A collective call."""
        function, args, kwargs = self.conversion(local.ndim)
        return function(local, *args, **kwargs)

    def conversion(self, ndim: int) -> tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]:
        """What makes a value of so many dimensions whole, with what it is called with after the value."""
        spec, r = self.spec._replace(dim=ndim - 1), self.ranks
        kwargs = {"rank": r.rank, "tp": r.tp, "group": r.group_name, "wire": self.wire}
        return function_for(spec, INVARIANT), (spec, INVARIANT), kwargs

    def argmax(self, local: Tensor) -> Tensor:
        """`torch.argmax` of the whole over the last dimension. A collective call."""
        r, pairs = self.ranks, largest(local, self.first)
        return place_of_largest(collectives.real("all_gather", pairs, "sum", tp=r.tp, group=r.group_name))


def largest(local: Tensor, first: int) -> Tensor:
    """The largest of a rank's columns and its place in the whole, for each row.

    Args:
        local: the columns. first: place of the first.

    Returns:
        Pairs, [..., 2] in float64, which has every float and the places of any vocabulary.
    """
    if not local.shape[-1]:
        return local.new_full((*local.shape[:-1], 2), -torch.inf, dtype=torch.float64)
    value, place = local.max(-1)
    return torch.stack((value.double(), place.double() + first), -1)


def place_of_largest(pairs: Tensor) -> Tensor:
    """As `torch.argmax` has it: the first of equal ones, and nan is the largest.

    Args:
        pairs: of all ranks, [tp, ..., 2]. Their columns follow each other, and ranks without any come last.
    """
    rank = pairs[..., 0].argmax(0, keepdim=True)
    return pairs[..., 1].gather(0, rank)[0].long()


def columns_of(captured: Capture, sharded: Sharded, ranks: Ranks) -> dict[int, Columns]:
    """What a rank has of the outputs that the program leaves split and that are no states, by position.

    Args:
        captured, sharded: the program of one process, and that of the ranks. ranks: this rank and the others.
    """
    out = {}
    for position, node in enumerate(compat.tree_leaves(sharded.graph.output_node().args[0])):
        layout = sharded.layouts.get(node) if isinstance(node, fx.Node) else None
        if isinstance(layout, Shard) and captured.becomes(position) is None:
            out[position] = Columns.of(layout, ranks)
    return out


class Deferred(Tensor):
    """The whole value, of which this rank has its columns until somebody reads more of it.

    Attributes:
        local: this rank's columns. columns: which those are. turn: before a collective.
        source: of a view the value that it is of, and the call that gives it.
    """

    local: Tensor
    columns: Columns
    turn: Turn
    source: tuple[Deferred, Any] | None
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Deferred], local: Tensor, columns: Columns, turn: Turn, source: tuple[Deferred, Any] | None = None
    ) -> Deferred:
        """A tensor without memory of the whole's shape."""
        shape = (*local.shape[:-1], columns.length)
        new: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # type: ignore[attr-defined]
        new.local, new.columns, new.turn, new.source, new._whole = local, columns, turn, source, None
        return new

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The rank's own way of a function that has one, else the function of the whole."""
        kwargs = kwargs or {}
        if func in DESCRIBES:
            with compat.without_torch_functions():
                return func(*args, **kwargs)
        way = WAYS.get(func)
        if way is not None and args and isinstance(args[0], Deferred) and args[0].unread:
            result = way(func, *args, **kwargs)
            if result is not None:
                return result
        return func(*gathered(args), **gathered(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """An operator that was called past torch's functions: of the whole."""
        return func(*gathered(args), **gathered(kwargs or {}))

    @property
    def unread(self) -> bool:
        """Whether nobody has gathered it, or what it is a view of, and may have written to that."""
        return self._whole is None and (self.source is None or self.source[0].unread)

    def whole(self) -> Tensor:
        """The ordinary tensor. A collective call, the first time."""
        if self._whole is None:
            if self.source is not None:
                value, view = self.source
                self._whole = view(value.whole())
            else:
                with self.turn("gathering of an output"):
                    self._whole = self.columns.whole(self.local)
        return self._whole  # type: ignore[return-value]


def gathered(values: Any) -> Any:
    """Nested containers with the whole in place of every value that is split. A collective call, where there is one."""
    if not any(isinstance(x, Deferred) for x in compat.tree_leaves(values, is_leaf=is_carrier)):
        return values
    return compat.tree_map(lambda x: x.whole() if isinstance(x, Deferred) else x, values, is_leaf=is_carrier)


def _rows(func: Any, x: Deferred, index: Any) -> Deferred | None:
    """Whole rows, by numbers and ranges in the dimensions before the last."""
    entries = index if isinstance(index, tuple) else (index,)
    ndim = x.local.ndim
    if any(type(i) not in (int, slice) for i in entries) or len(entries) > ndim:
        return None
    if len(entries) == ndim and entries[-1] != slice(None):
        return None
    return Deferred(func(x.local, index), x.columns, x.turn, (x, lambda whole: func(whole, index)))


def _same(func: Any, x: Deferred) -> Deferred:
    """The same memory as another tensor."""
    return Deferred(func(x.local), x.columns, x.turn, (x, func))


def _copied(func: Any, x: Deferred, *args: Any, **kwargs: Any) -> Deferred | None:
    """A copy, where need be, in another type or not."""
    local = func(x.local, *args, **kwargs)
    if local is x.local:
        return x
    if not local.is_floating_point() or local.device != x.local.device:
        return None
    return Deferred(local, x.columns.cast(x.local.dtype, local.dtype), x.turn)


def _argmax(func: Any, x: Deferred, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    """The place of the largest of each row."""
    if dim not in (-1, x.local.ndim - 1) or not x.local.is_floating_point():
        return None
    with x.turn("argmax of an output"):
        place = x.columns.argmax(x.local)
    return place.unsqueeze(-1) if keepdim else place


# What has a way of its own on a rank's columns. A way gives None where the arguments ask for more.
WAYS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _rows,
    Tensor.detach: _same,
    **dict.fromkeys((Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16), _copied),
    **dict.fromkeys((Tensor.clone, torch.clone), _copied),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}

PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu")
METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "__hash__")
# What asks for no value.
DESCRIBES = {getattr(Tensor, name).__get__ for name in PROPERTIES}
DESCRIBES |= {getattr(Tensor, name) for name in METHODS}
