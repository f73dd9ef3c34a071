"""Rows and slices of a sharded module's tensors that can be written to: `weight[3].zero_()`, `weight[:, 2] = 1`.

Where a tensor is split on the dimension that is indexed, DTensor hands out a gathered copy, and what is written to that
is lost. Such a copy is a `Window` here: after each write the ranks put it where it belongs (collective).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as Whole

from autotp import compat

aten: Any = torch.ops.aten
VIEWS = (
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default,
    aten.view.default,
)  # fmt: skip


class Window(DTensor):
    """A gathered copy of a part of a tensor. `_source` is that tensor, and the operator that made the copy."""

    _source: tuple[DTensor, Any, tuple[Any, ...], dict[str, Any], int | None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as a DTensor does; then write back what was written, and follow views."""
        kwargs = kwargs or {}
        window = next(x for x in compat.tree_leaves((args, kwargs)) if isinstance(x, Window))
        plain = compat.tree_map_only(Tensor, lambda t: _plain(t, window), (args, kwargs))
        if func is aten.fill_.Tensor:
            func, plain = aten.fill_.Scalar, ((plain[0][0], args[1].item()), {})
        result = func(*plain[0], **plain[1])
        targets = _written_by(func, args, kwargs)
        for each in targets:
            _write_back(each)
        if targets and isinstance(result, DTensor):
            return targets[0]
        return follow(result, args[0], func, args, kwargs) if func._schema._is_view_op() else result


def _plain(tensor: Tensor, window: DTensor) -> Tensor:
    """The same as a DTensor that is no window."""
    if isinstance(tensor, Window):
        return compat.like_dtensor(compat.local_of(tensor), tensor)
    if isinstance(tensor, DTensor) or tensor.ndim == 0:
        return tensor
    mesh = window.device_mesh
    return DTensor.from_local(tensor, mesh, [Whole()] * mesh.ndim, run_check=False)


def _written_by(func: Any, args: Any, kwargs: Any) -> list[Window]:
    out = []
    for i, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            argument = args[i] if i < len(args) else kwargs.get(declared.name)
            out += [x for x in compat.tree_leaves(argument) if isinstance(x, Window)]
    return out


def follow(result: Any, of: DTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """What a view operator made of a tensor: windows, where it is no view of the tensor's memory, or of one."""
    several = isinstance(result, list | tuple)
    for i, view in enumerate(result if several else [result]):
        if isinstance(view, DTensor) and (isinstance(of, Window) or not _one_memory(view, of)):
            view.__class__ = Window  # type: ignore[assignment]
            view._source = (of, func, tuple(args[1:]), dict(kwargs), i if several else None)  # type: ignore[attr-defined]
    return result


def _one_memory(a: DTensor, b: DTensor) -> bool:
    memory = [compat.local_of(t).untyped_storage()._cdata for t in (a, b)]
    return memory[0] == memory[1]


@torch.no_grad()
def _write_back(window: Window) -> None:
    of, func, args, kwargs, index = window._source
    if not _one_memory(window, of):
        whole = _plain(of, of).full_tensor().clone()  # type: ignore[attr-defined]
        view = func(whole, *args, **kwargs)
        (view if index is None else view[index]).copy_(_plain(window, window).full_tensor())  # type: ignore[attr-defined]
        compat.local_of(of).copy_(
            compat.local_of(distribute_tensor(whole, of.device_mesh, of.placements, src_data_rank=None))
        )
    if isinstance(of, Window):
        _write_back(of)
