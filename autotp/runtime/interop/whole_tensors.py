"""Random numbers, `.data` and elements of a sharded module's tensors: what they are on the whole tensor, or refused.

Torch's DTensor draws for each rank's part by itself, so that under a common seed every shard gets the same numbers; an
assignment to `.data` leaves the local tensor as it is; and a row of what is split by rows is a gathered copy, in which
a write is lost. The first two are put right, and the last is refused, for tensors over the tp ranks of a sharded module
(and over further mesh axes beside it); other DTensors are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autotp import compat
from autotp.errors import StateError

from . import data_writes
from .ownership import ours

aten: Any = torch.ops.aten

DRAWS = (  # what gives or fills a whole tensor, whatever was there
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default,
    aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"), aten.eye.m_out,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
)  # fmt: skip
VIEWS = (
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default,
    aten.view.default,
)  # fmt: skip
WHOLE_INSTEAD = "Change the whole tensor and assign it, on every rank: w = p.detach().full_tensor(); p.data = w."

_data: Any = Tensor.data


def install() -> None:
    """Draw and assign tensors of sharded modules as whole tensors, in this process."""
    for operator in DRAWS:
        _handle(operator, _draw)
    for operator in VIEWS:
        _handle(operator, _view)
    _handle(aten.fill_.Tensor, _fill)
    _handle(aten.t_.default, _refuse)
    compat.replace_data(_counted)


def _part(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank has whole."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _empty(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=compat.local_of(like).device)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw the whole tensor on every rank, from generators that are in one state, and keep this rank's part."""
    return _on_whole(operator, compat.tree_map_only(DTensor, _empty, (args, kwargs)), kwargs.get("out", args[0]))


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Write to single elements, in the whole tensor (collective)."""
    return _on_whole(
        operator, compat.tree_map_only(DTensor, lambda t: t.full_tensor().clone(), (args, kwargs)), args[0]
    )


def _on_whole(operator: Any, whole: Any, like: DTensor) -> DTensor:
    """Return this rank's part of what an operator makes of whole tensors, in `like` where it writes."""
    part = _part(operator(*whole[0], **whole[1]), like)
    if not operator._schema.is_mutable:
        return part
    compat.local_of(like).copy_(compat.local_of(part))
    return like


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return aten.fill_.Scalar(args[0], args[1].item())


def _refuse(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise StateError(f"{operator} of a tensor that lies over ranks is not supported. {WHOLE_INSTEAD}")


class Gathered(DTensor):
    """A copy of a part of a tensor, where a plain tensor would give a view: it can be read, and not be written."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as a DTensor does.

        Raises:
            StateError: it would be written to.
        """
        for i, declared in enumerate(func._schema.arguments):
            argument = args[i] if i < len(args) else (kwargs or {}).get(declared.name)
            writes = declared.alias_info is not None and declared.alias_info.is_write
            if writes and any(isinstance(x, Gathered) for x in compat.tree_leaves(argument)):
                raise StateError(
                    f"{func} writes to a row, slice or view of a tensor that is split there: on a rank that is a copy, "
                    f"and what is written would be lost. {WHOLE_INSTEAD}"
                )
        plain = compat.tree_map_only(Gathered, lambda t: compat.like_dtensor(compat.local_of(t), t), (args, kwargs))
        result = func(*plain[0], **(plain[1] or {}))
        return _marked(result, args[0]) if func._schema._is_view_op() else result


def _marked(result: Any, of: DTensor) -> Any:
    """Note which of the views of a tensor are copies."""
    for view in result if isinstance(result, list | tuple) else [result]:
        if isinstance(view, DTensor) and (isinstance(of, Gathered) or not _one_memory(view, of)):
            view.__class__ = Gathered  # type: ignore[assignment]
    return result


def _one_memory(a: DTensor, b: DTensor) -> bool:
    memory = [compat.local_of(t).untyped_storage()._cdata for t in (a, b)]
    return memory[0] == memory[1]


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    view = compat.by_default(operator, args, kwargs)
    if torch.is_grad_enabled() and args[0].requires_grad:
        return view  # which autograd lets nobody write to
    return _marked(view, args[0])


@torch.no_grad()
def _assign(tensor: DTensor, value: Tensor) -> DTensor:
    """Return what `tensor.data = value` makes of a DTensor: a whole tensor is split as it is.

    Raises:
        StateError: the value is another tensor than that.
    """
    mesh = tensor.device_mesh
    if value.shape != tensor.shape or (isinstance(value, DTensor) and value.device_mesh != mesh):
        over = f" over {value.device_mesh}" if isinstance(value, DTensor) else ""
        raise StateError(
            f".data = a tensor of shape {tuple(value.shape)}{over}: this one has the shape {tuple(tensor.shape)} over "
            f"{mesh}. Assign a whole tensor, the same on every rank, or a DTensor over the same ranks."
        )
    if isinstance(value, DTensor):
        data: Any = value.detach()
        return data if data.placements == tensor.placements else data.redistribute(placements=tensor.placements)
    return _part(value.detach().to(compat.local_of(tensor).device), tensor)


# ---- where torch is told ---------------------------------------------------------------------------------------------


def _handle(operator: Any, handler: Any) -> None:
    """Let `handler(operator, args, kwargs)` compute an operator of our tensors, through DTensor's table for that."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = kwargs.get("out", args[0])
        own = ours(tensor) and not tensor.is_meta
        return handler(op, args, kwargs) if own else compat.by_default(op, args, kwargs)

    compat.operator_handlers()[operator] = handle


def _counted(torchs: Any) -> property:
    """Make `.data` whose assignments replace the local tensor, which has the values: torch's setter leaves it.

    What is written to that of a parameter, and assignments, are counted.
    """

    def get(self: Any) -> Any:
        counts = isinstance(self, nn.Parameter) and ours(self)
        return data_writes.alias_of(self, torchs.__get__) if counts else torchs.__get__(self)

    def put(self: Any, value: Tensor) -> None:
        if not ours(self):
            torchs.__set__(self, value)
            return
        before, source = compat.local_of(self), _assign(self, value)
        torchs.__set__(self, source)
        self._local_tensor, self._spec = source._local_tensor, source._spec
        if isinstance(self, nn.Parameter):
            data_writes.assigned(self, before)

    return property(get, put)
