"""The four communication primitives, between processes and simulated in one process.

Each takes and gives one tensor per rank that is present: one in real execution, all `tp` in simulation. Tensors
have the same shape on every rank. Where a primitive speaks of all ranks, that is dimension 0 of size `tp`:

| primitive      | in          | out         |
| -------------- | ----------- | ----------- |
| all_reduce     | [...]       | [...]       |
| all_gather     | [...]       | [tp, ...]   |
| reduce_scatter | [tp, ...]   | [...]       |
| all_to_all     | [tp, ...]   | [tp, ...]   |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from autotp.compat import below_autograd, c10d_ops

from .lockstep import lost

Primitive = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Exchange = Callable[[Primitive, list[Tensor], str], list[Tensor]]

_wait = c10d_ops.wait_tensor.default
_all_reduce = c10d_ops.all_reduce.default
_all_gather = c10d_ops.all_gather_into_tensor.default
_reduce_scatter = c10d_ops.reduce_scatter_tensor.default
_all_to_all = c10d_ops.all_to_all_single.default


def real(
    primitive: Primitive, x: Tensor, reduction: str, *, tp: int, group: str, peers: Sequence[int] = (),
    rows: tuple[list[int], list[int]] | None = None,
) -> Tensor:  # fmt: skip
    """Run a functional collective over the process group named `group`; return this rank's result.

    Args:
        primitive: of the collective. x: this rank's operand. reduction: of sums. tp, group: the ranks.
        peers: those of them that gather, or scatter a sum, each group among itself; none for all.
        rows: of an exchange, those that go to each rank and come from each; None for a dimension of all ranks.
    """
    try:
        with _unrecorded():
            if rows is not None:
                return _decode(_wait(_all_to_all(_encode(x), rows[1], rows[0], group)), x.dtype)
            if peers:
                return _among(primitive, x, tp, group, peers)
            return _finish(primitive, _start(primitive, x, reduction, tp, group), x.dtype)
    except RuntimeError as error:
        lost(error, group)
        raise


def travelled(xs: list[Tensor], rows: Sequence[list[int]]) -> list[Tensor]:
    """Exchange as many rows as each rank sends to each, in one process.

    Args:
        xs: each rank's rows, in the order of whom they go to. rows: of each rank, those to each.
    """
    if xs[0].is_meta:  # no numbers, and so no counts
        return xs
    parts = [x.split(counts) for x, counts in zip(xs, rows, strict=True)]
    return [torch.cat(slices) for slices in zip(*parts, strict=True)]


def start(primitive: Primitive, x: Tensor, reduction: str, *, tp: int, group: str) -> Tensor:
    """Start a collective, whose result may be read after `finish` only."""
    try:
        with _unrecorded():
            return _start(primitive, x, reduction, tp, group)
    except RuntimeError as error:
        lost(error, group)
        raise


def finish(primitive: Primitive, started: Tensor, dtype: torch.dtype, group: str) -> Tensor:
    """Wait for what `start` returned, and return the collective's result in this type."""
    try:
        with _unrecorded():
            return _finish(primitive, started, dtype)
    except RuntimeError as error:
        lost(error, group)
        raise


def summing(reduction: str, group: str) -> Callable[[Tensor], Tensor]:
    """Return an all-reduce of floating numbers below autograd, for callers that name a lost rank themselves."""
    return lambda x: _wait(_all_reduce(x.contiguous(), reduction, group))


def _unrecorded() -> AbstractContextManager[Any]:
    """Return a context below autograd where nothing is recorded: torch would ask Python at every call whether it is."""
    return nullcontext() if torch.is_grad_enabled() or torch.compiler.is_compiling() else below_autograd()


def _start(primitive: Primitive, x: Tensor, reduction: str, tp: int, group: str) -> Tensor:
    wire = _encode(x)
    reduction = "max" if x.dtype == torch.bool else reduction  # a sum of booleans is "any"
    if primitive == "all_reduce":
        return _all_reduce(wire, reduction, group)
    if primitive == "all_gather":
        return _all_gather(wire.unsqueeze(0), tp, group)
    if primitive == "reduce_scatter":
        return _reduce_scatter(wire, reduction, tp, group)
    return _all_to_all(wire, [1] * tp, [1] * tp, group)


def _finish(primitive: Primitive, started: Tensor, dtype: torch.dtype) -> Tensor:
    out = _decode(_wait(started), dtype)
    return out.squeeze(0) if primitive == "reduce_scatter" else out


def _among(primitive: Primitive, x: Tensor, tp: int, group: str, peers: Sequence[int]) -> Tensor:
    # By pairs of the one group that there is: who is no peer is sent nothing.
    splits = [int(rank in peers) for rank in range(tp)]
    parts = x.unsqueeze(0).expand(len(peers), *x.shape) if primitive == "all_gather" else x
    out = _decode(_wait(_all_to_all(_encode(parts), splits, splits, group)), x.dtype)
    return out if primitive == "all_gather" else out.sum(0, dtype=x.dtype)


def simulated(primitive: Primitive, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return all ranks' results of a gather or an exchange, in one process; sums are `virtual.AllHosts`'.

    Args:
        primitive: of the collective. xs: each rank's operand, in order; all of one shape.
    """
    if primitive == "all_gather":
        return [torch.stack(list(xs)) for _ in xs]
    return [torch.stack(slices) for slices in zip(*xs, strict=True)]


def _encode(x: Tensor) -> Tensor:
    """Convert the values to a type that gloo and NCCL carry."""
    x = x.contiguous()
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    if x.dtype == torch.int16:
        return x.to(torch.int32)
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _decode(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x
    if dtype == torch.bool:
        return x.view(torch.bool)
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)
