"""Random numbers, `.data` and initialisers on a sharded module's tensors: what they are on the whole tensor.

Torch's DTensor draws for each rank's part by itself, so that under a common seed every shard gets the same numbers, and
an assignment to `.data` leaves the local tensor as it is. Both are put right for tensors over the tp ranks of a sharded
module (and over further mesh axes beside it); other DTensors are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autotp import compat
from autotp.errors import StateError

from . import data_writes, windows
from .ours import ours

aten: Any = torch.ops.aten

FILLS = (  # what fills a tensor with random numbers, whatever was there
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default,
    aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"),
)  # fmt: skip
LIKES = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)

_data: Any = Tensor.data
_torchs: dict[Any, Callable[..., Any]] = {}  # what torch does with an operator that is handled here


def install() -> None:
    """Initialise, draw and assign tensors of sharded modules as whole tensors, in this process."""
    for operators, handler in (
        (FILLS, _fill),
        (LIKES, _like),
        ((aten.eye.m_out,), _eye),
        ((aten.fill_.Tensor,), _fill_with),
        ((aten.t_.default,), _transpose),
        (windows.VIEWS, _view),
    ):
        for operator in operators:
            _handle(operator, handler)
    _handle_data()
    _handle_trunc_normal()


def _part(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _empty(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=compat.local_of(like).device)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw the whole tensor on every rank, from generators that are in one state, and keep this rank's part."""
    tensor: DTensor = args[0]
    whole = operator(_empty(tensor), *args[1:], **kwargs)
    compat.local_of(tensor).copy_(compat.local_of(_part(whole, tensor)))
    return tensor


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _part(operator(_empty(args[0]), *args[1:], **kwargs), args[0])


def _eye(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = kwargs["out"]
    whole = operator(*args, out=_empty(tensor))
    compat.local_of(tensor).copy_(compat.local_of(_part(whole, tensor)))
    return tensor


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A write to single elements, in the whole tensor (collective)."""
    tensor: DTensor = args[0]
    whole = compat.tree_map_only(DTensor, lambda t: t.full_tensor(), (args, kwargs))
    value = operator(whole[0][0].clone(), *whole[0][1:], **whole[1])
    compat.local_of(tensor).copy_(compat.local_of(_part(value, tensor)))
    return tensor


def _fill_with(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return aten.fill_.Scalar(args[0], args[1].item())


def _transpose(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """In place, as `nn.init.orthogonal_` does it."""
    return _become(args[0], args[0].t())


def _become(tensor: Any, source: Any) -> Any:
    """Give a DTensor the size and the local tensor of another."""
    _data.__set__(tensor, source)
    tensor._local_tensor, tensor._spec = source._local_tensor, source._spec
    return tensor


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    view = _torchs[operator](operator, args, kwargs)
    if torch.is_grad_enabled() and args[0].requires_grad:
        return view  # which autograd lets nobody write to
    return windows.follow(view, args[0], operator, args, kwargs)


@torch.no_grad()
def _init(init: Any, tensor: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    """An initialiser that overwrites all of a tensor, on the whole one."""
    whole = init(_empty(tensor), *args, **kwargs)
    compat.local_of(tensor).copy_(compat.local_of(_part(whole, tensor)))
    return tensor


@torch.no_grad()
def _assign(tensor: DTensor, value: Tensor) -> DTensor:
    """What `tensor.data = value` makes of a DTensor: a whole tensor is split as it is.

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


def _handle(operator: Any, handler: Callable[..., Any]) -> None:
    """Let `handler(operator, args, kwargs)` compute an operator of our tensors, through DTensor's table for that."""
    table = compat.operator_handlers()
    before = table.get(operator)

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = kwargs.get("out", args[0])
        if ours(tensor) and not tensor.is_meta:
            return handler(op, args, kwargs)
        return torchs(op, args, kwargs)

    def torchs(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if before is not None:
            return before(op, args, kwargs)
        del table[op]
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = handle

    table[operator], _torchs[operator] = handle, torchs


def _handle_data() -> None:
    """`tensor.data = value`: torch's setter exchanges the outer tensor alone, and the local one has the values.

    What is written to that of a parameter, and assignments, are counted.
    """

    def get(self: Any) -> Any:
        counts = isinstance(self, nn.Parameter) and ours(self)
        return data_writes.alias_of(self, _data.__get__) if counts else _data.__get__(self)

    def put(self: Any, value: Tensor) -> None:
        if ours(self):
            before = compat.local_of(self)
            _become(self, _assign(self, value))
            if isinstance(self, nn.Parameter):
                data_writes.assigned(self, before)
        else:
            _data.__set__(self, value)

    DTensor.data = property(get, put)  # type: ignore[assignment]


def _handle_trunc_normal() -> None:
    """It draws again what is out of bounds, and ranks would do that another number of times for each part."""
    init = nn.init._no_grad_trunc_normal_

    @functools.wraps(init)
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return _init(init, tensor, *args, **kwargs) if ours(tensor) else init(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = run
