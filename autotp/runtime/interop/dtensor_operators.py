"""Operators on DTensors that torch computes from a rank's part alone: here computed of the whole tensors, or refused.

Torch looks an operator up in a table of handlers before it asks for the placements of its operands. That table is the
whole process's, so a handler refuses only tensors over the ranks of a sharded module, and is otherwise right for every
DTensor.

Collectives that torch begins for DTensors of a sharded module (`full_tensor()`, clipping, norms as numbers) are begun
once all ranks are at the same one, as forwards and backwards are; those of an optimizer's step too, for between them
another thread may make calls, on each rank at another place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from autotp import compat
from autotp.comm.lockstep import meeting_in, whole_backward
from autotp.errors import StateError
from autotp.inputs import Leaves

from .ownership import (
    DDP,
    handle_between_steps,
    in_parts,
    ours,
    refuse_clipping,
    refuse_drawing,
    stepping,
    wide_group,
)

aten: Any = torch.ops.aten

DRAWS = (  # what fills a whole tensor, or gives one, whatever was there
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default,
    aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"), aten.eye.m_out,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
)  # fmt: skip
PART_BY_PART = aten.t_.default, aten.fill_.Tensor
VIEWS = (
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default,
    aten.view.default,
)  # fmt: skip
WHOLE_INSTEAD = (
    "Take the whole, w = p.detach().full_tensor(), and read or change that; load it on every rank by "
    "sharded.load_state_dict({name: w}, strict=False)."
)
Handler = Callable[[Any, Sequence[Any], Any], Any]


@functools.cache
def install() -> None:
    """Let torch compute these operators as this file has them. Once per process."""
    compat.operator_handlers().update(HANDLERS)
    handle_between_steps(WRITES)
    compat.replace_data(_data)
    compat.around_redistribution(_compared_first)
    compat.around_backward(whole_backward)


def _number(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Read a tensor of one element as a Python number: no collective, as it may be asked for on one rank alone.

    Within an optimizer's step all ranks ask, and it is the whole tensor's.
    """
    value = args[0]
    if in_parts(value) and ours(value):
        if not stepping():
            how = " and ".join(sorted({str(p) for p in value.placements if not isinstance(p, Replicate)}))
            raise StateError(
                f"a number was asked (item, float, bool) of a DTensor that is {how}: each rank holds its own part of "
                "it, such as the norm of its slice of a gradient. Call .full_tensor() first, on every rank, as in "
                "p.grad.norm().full_tensor().item()."
            )
        value = value.full_tensor()
    return op(_local(value))


def _overflow(op: Any, args: Leaves, kwargs: Any) -> None:
    """Unscale gradients in place, and note an overflow wherever any rank has one, whichever gradient it is in.

    Torch's own reduces the note over the mesh dimensions that the first gradient is sharded on.
    """
    grads, overflow, scale = args
    op([_local(g) for g in grads], overflow, scale)
    meshes = {}
    for g in grads:
        if isinstance(g, DTensor):
            split = {i for i, p in enumerate(g.placements) if not isinstance(p, Replicate)}
            meshes[g.device_mesh] = meshes.get(g.device_mesh, set()) | split
    # Once for each mesh, over all axes that some gradient is split on: on a rank without a part of it there is no note.
    for mesh, split in meshes.items():
        if split:
            placements: list[Placement] = [Replicate()] * mesh.ndim
            for i in split:
                placements[i] = Partial("max")
            overflow.copy_(DTensor.from_local(overflow.clone(), mesh, placements, run_check=False).full_tensor())


def _by_element(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Compute an operator over lists, which works element by element on what is at one place, on each rank's part.

    Raises:
        StateError: two tensors at one place differ in mesh or placements.
    """
    lists = [x for x in args if _is_list(x)]
    for at_one_place in zip(*(x for x in lists if len(x) == len(lists[0])), strict=True):
        _refuse_unlike(op, [t for t in at_one_place if isinstance(t, Tensor) and t.ndim])
    return op(*map(_local, args), **{k: _local(v) for k, v in kwargs.items()})


def _counted(handler: Handler) -> Handler:
    """Count what a handler writes to DTensors in a list as writes to these, as torch does with any other tensor."""

    def handle(op: Any, args: Leaves, kwargs: Any) -> Any:
        results = handler(op, args, kwargs)
        if op._schema.is_mutable:
            distributed = [t for t in args[0] if isinstance(t, DTensor) and not t.is_inference()]
            torch.autograd.graph.increment_version(distributed)
        return results

    return handle


def _mixed(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Interpolate lists by a number each: of its own parts on each rank, for torch 2.11 has no rule for it."""
    into, ends, *rest = args
    ends = [
        end.redistribute(to.device_mesh, to.placements) if isinstance(end, DTensor) and isinstance(to, DTensor) else end
        for to, end in zip(into, ends, strict=True)
    ]
    return _by_element(op, (into, ends, *rest), kwargs)


def _lists(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Compute an operator over lists of tensors, of which those that are no DTensors are whole.

    What is made of whole tensors alone is given back as it came, and is no DTensor.
    """
    lists = [x for x in args if _is_list(x)]
    mesh = next((t.device_mesh for x in lists for t in x if ours(t)), None)
    # A step counter has a place of its own in one list and none in another: a place is whole where no list has a
    # DTensor there.
    whole = {i for i, column in enumerate(zip_longest(*lists)) if _is_whole(column)}
    if mesh is None or not whole:
        return compat.by_default(op, args, kwargs)
    on_mesh = [_at(whole, functools.partial(_whole, mesh=mesh), x) for x in args]
    results = compat.by_default(op, on_mesh, kwargs)
    return _at(whole, _local, results)


def _is_whole(column: Sequence[Any]) -> bool:
    """Return whether what lists have at one place are tensors, and none of them a DTensor."""
    return {isinstance(t, DTensor) for t in column if isinstance(t, Tensor)} == {False}


def _at(places: set[int], function: Callable[[Any], Any], value: Any) -> Any:
    """Map the tensors of a list at these places; return anything else as it is."""
    if not _is_list(value):
        return value
    tensors = []
    for i, t in enumerate(value):
        tensors.append(function(t) if i in places else t)
    return tensors


def _stack(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Stack DTensors with whole tensors as whole ones: so is the norm over both kinds of gradients."""
    tensors, *rest = args
    refuse_clipping(tensors)
    if all(isinstance(t, DTensor) for t in tensors) or torch.is_grad_enabled() or not any(map(ours, tensors)):
        return compat.by_default(op, args, kwargs)
    return op(compat.tree_map_only(DTensor, DTensor.full_tensor, tensors), *rest, **kwargs)


def _put(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Overwrite what a mask of the tensor's own shape says with one number."""
    into, indices, value, *_ = args
    mask = indices[0]
    number = not isinstance(value, DTensor) and value.numel() == 1
    if len(indices) > 1 or not number or not isinstance(mask, DTensor) or mask.dtype != torch.bool:
        return _on_parts(op, args, kwargs)
    _refuse_unlike(op, [into, mask])
    op(*map(_local, args), **kwargs)
    return into


def _norms(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Compute norms along dimensions, of which a rank may have summands: in an optimizer's step made whole at once.

    They are then squared in place and the like, which torch refuses for summands.
    """
    norms = compat.by_default(op, args, kwargs)
    if isinstance(norms, DTensor) and norms.ndim and any(p.is_partial() for p in norms.placements) and stepping():
        return norms.redistribute(placements=list(map(_whole_if_partial, norms.placements)))
    return norms


def _whole_if_partial(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _refuse_unlike(op: Any, tensors: Sequence[Any]) -> None:
    """Refuse tensors whose meshes or placements differ, or are partial."""
    ways = {_way(t) for t in tensors}
    if len(ways) > 1 or any(p.is_partial() for _, placements in ways for p in placements):
        layouts = " and ".join(str(placements or "whole") for _, placements in ways)
        raise StateError(f"{op} computes element by element, and its tensors are placed on the ranks as {layouts}.")


def _way(tensor: Any) -> tuple[DeviceMesh | None, tuple[Placement, ...]]:
    """Return the mesh and placements of a tensor; none of one that is whole."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(t, Tensor) for t in value)


def _whole(value: Any, mesh: DeviceMesh) -> Any:
    """Return the same memory as a DTensor that is whole on every rank; as it is what is one, or is no tensor."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return compat.local_of(value)
    if isinstance(value, list | tuple):
        return [_local(v) for v in value]
    return value


def _broadcast(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Refuse a broadcast of a sharded module's parameters, with which `DistributedDataParallel` begins."""
    if any(isinstance(x, DTensor) and ours(x) for x in args[0]):
        raise StateError(f"one rank's part of a sharded module's parameters would be broadcast to all. {DDP}")
    return compat.by_default(op, args, kwargs)


# ---- operators that draw, and that are refused, of a tensor that is distributed over ranks ---------------------------


def _draw(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Draw the whole tensor on every rank, from generators that are in one state, and keep this rank's part.

    By itself torch draws each rank's part alone, so that under a common seed every shard gets the same numbers.
    """
    like = kwargs.get("out", args[0])
    if not ours(like) or like.is_meta:
        return compat.by_default(op, args, kwargs)
    refuse_drawing(like)
    whole = op(*compat.tree_map_only(DTensor, _empty, args), **compat.tree_map_only(DTensor, _empty, kwargs))
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    if not op._schema.is_mutable:
        return part
    compat.local_of(like).copy_(compat.local_of(part))
    return like


def _empty(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=compat.local_of(like).device)


def _on_parts(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Refuse an operator that each rank would compute of its part alone."""
    tensor = kwargs.get("out", args[0])
    if ours(tensor) and not tensor.is_meta:
        raise StateError(f"{op} of a tensor that is distributed over ranks: a rank has its part alone. {WHOLE_INSTEAD}")
    return compat.by_default(op, args, kwargs)


def _write(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Write what every rank has whole to a tensor that is distributed over ranks: each takes its part."""
    into, *others = args
    if ours(into):
        others = [_whole(x, into.device_mesh) for x in others]
    return compat.by_default(op, (into, *others), kwargs)


def _view(op: Any, args: Leaves, kwargs: Any) -> Any:
    """Take a row, slice or view; refuse one that is a copy on a rank, where a write to it would be lost.

    An optimizer's step may read it, and autograd lets nobody write to a view of what it records.
    """
    views, of = compat.by_default(op, args, kwargs), args[0]
    if not ours(of) or of.is_meta or stepping() or (torch.is_grad_enabled() and of.requires_grad):
        return views
    for view in views if isinstance(views, list | tuple) else [views]:
        if _memory(view) != _memory(of):
            raise StateError(f"{op} of a tensor that is split there gives a copy, and no view. {WHOLE_INSTEAD}")
    return views


def _memory(tensor: DTensor) -> int:
    return compat.local_of(tensor).untyped_storage()._cdata


def _data(torchs: Any) -> property:
    """Make `.data` of DTensors: writes to a parameter's are counted as its own, and an assignment writes to it.

    Args:
        torchs: its property, whose assignment leaves the local tensor as it is.
    """

    def get(self: Any) -> Any:
        return self.detach() if isinstance(self, nn.Parameter) and ours(self) else torchs.__get__(self)

    def put(self: Any, value: Any) -> None:
        if not ours(self):
            torchs.__set__(self, value)
            return
        if not isinstance(value, DTensor) or _kind(value) != _kind(self):
            raise StateError(
                f".data = a tensor of shape {tuple(value.shape)} that is not placed on the ranks as this one is, of "
                f"shape {tuple(self.shape)} over {self.device_mesh}. {WHOLE_INSTEAD}"
            )
        with torch.no_grad():
            compat.local_of(self).copy_(compat.local_of(value))

    return property(get, put)


def _kind(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, compat.local_of(tensor).device, *_way(tensor)


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(DRAWS, _draw),
    **dict.fromkeys(PART_BY_PART, _on_parts),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(compat.operators_named("_foreach_", "_fused_adam_", "_fused_adamw_"), _counted(_lists)),
    **dict.fromkeys(compat.operators_named("_foreach_copy_", "_fused_sgd_", "_fused_adagrad_"), _counted(_by_element)),
    aten._foreach_lerp_.ScalarList: _counted(_mixed),
    aten._local_scalar_dense.default: _number,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _counted(_overflow),
    aten.index_put_.default: _put,
    aten.stack.default: _stack,
    aten.linalg_vector_norm.default: _norms,
    aten.norm.ScalarOpt_dim: _norms,
    torch.ops.c10d.broadcast_.default: _broadcast,
}

WRITES = dict.fromkeys(compat.operators_named("copy_", "add_.T", "sub_.T", "mul_.T", "div_.T", "lerp_."), _write)


# ---- collectives that torch begins -----------------------------------------------------------------------------------


def _compared_first(run: Callable[[], Tensor], local: Any, source: Any, target: Any) -> Tensor:
    """Compare a collective over the ranks before it is begun, and name the rank where it fails."""
    group = (
        "" if torch.compiler.is_compiling() or type(local) not in (Tensor, nn.Parameter) else _group_of(source, target)
    )
    if not group:
        return run()
    before, after = (", ".join(map(str, spec.placements)) for spec in (source, target))
    what = f"collective of torch, {tuple(source.shape)} from {before} to {after}"
    with meeting_in(group, what):
        return run()


def _group_of(source: Any, target: Any) -> str:
    """Return the group whose ranks communicate; "" where nobody does, or the ranks of no sharded module."""
    mesh, pairs = source.mesh, list(zip(source.placements, target.placements, strict=True))
    dims = [i for i, (a, b) in enumerate(pairs) if a != b and not a.is_replicate() and mesh.size(i) > 1]
    return wide_group(mesh, dims) if dims else ""
