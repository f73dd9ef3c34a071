"""How a rank holds a parameter: DTensors that torch's own tools understand, and back to the original's shape.

A plain split is one DTensor `Shard(dim)`. What DTensor cannot say (a fused q/k/v, uneven whole heads) is held as one
piece for each segment, so that every piece is a plain `Shard`; every state dict speaks the original name.
Outputs that are left sharded are said in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as Summand
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement

from autotp.compat import like_dtensor, local_of
from autotp.ir.layouts import Layout, Partition, Segment, chunk

MOST = 16  # pieces of a parameter


@dataclass(frozen=True)
class Piece:
    """One DTensor of a parameter: `offset` and `length` along the run, the piece's shape, its sharded dimension."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class Storage:
    """The pieces of one parameter of this shape under this layout on `tp` ranks."""

    shape: tuple[int, ...]
    layout: Layout
    tp: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Empty for a parameter that is held whole: one that is not split, and a bias of uneven heads."""
        d, (segments, times) = self.layout.sharded_dim, self._run
        if d is None or not segments:
            return ()
        out, at = [], 0
        for s in segments:
            assert isinstance(s.count, int) and isinstance(s.unit, int)
            # Units larger than one need a dimension of their own, but where single elements are dealt in the same way.
            flat = Partition.plain(s.length, self.tp).segments == (s,)
            units = (s.count * s.unit,) if flat or s.count % self.tp == 0 else (s.count, s.unit)
            repeat = (times,) if times > 1 else ()
            shape = (*self.shape[:d], *repeat, *units, *self.shape[d + 1 :])
            out.append(Piece(at, s.count * s.unit, shape, d + len(repeat)))
            at += s.count * s.unit
        # What picks parameters by their dimensions (weight decay) must not take a bias for a matrix.
        matrices = [x for x in out if len(x.shape) > 1]
        return () if len(self.shape) == 1 and matrices else tuple(out)

    @property
    def _run(self) -> tuple[tuple[Segment, ...], int]:
        """The segments that pieces are made of, and how often their run comes along the sharded dimension.

        A few runs are as many pieces, in the parameter's own dimensions; many are one piece with a dimension more.
        """
        if (partition := self.layout.stored) is None:
            return (), 1
        segments, times = partition.segments, partition.repeat
        assert isinstance(times, int)  # a parameter's size is no symbol
        return (segments * times, 1) if len(segments) * times <= MOST else (segments, times)

    @property
    def repeat(self) -> int:
        """How often the run of pieces comes along the sharded dimension."""
        return self._run[1]

    def names(self, name: str) -> list[str]:
        """Attribute names of what holds the parameter `name`: its own where that has its dimensions."""
        plain = len(self.pieces) <= 1 and all(len(x.shape) == len(self.shape) for x in self.pieces)
        if plain:
            return [name]
        return [f"{name}_part{i}" for i in range(len(self.pieces))]

    @property
    def as_held(self) -> bool:
        """Whether the rank's slice is one DTensor's local tensor in the parameter's own dimensions."""
        return self.layout.sharded_dim is None or [len(x.shape) for x in self.pieces] == [len(self.shape)]

    @property
    def held_whole(self) -> bool:
        """Whether every rank holds all of it, and uses a slice."""
        return self.layout.sharded_dim is not None and not self.pieces

    def cut(self, full: Tensor) -> list[Tensor]:
        """The whole pieces of a whole parameter, as views."""
        d = self.layout.sharded_dim
        if d is None or not self.pieces:
            return [full]
        run = full.unflatten(d, (self.repeat, -1))
        return [run.narrow(d + 1, x.offset, x.length).reshape(x.shape) for x in self.pieces]

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of `cut`."""
        d, repeat = self.layout.sharded_dim, self.repeat
        if d is None or not self.pieces:
            return pieces[0]
        runs = [
            t.reshape(*self.shape[:d], repeat, x.length, *self.shape[d + 1 :])
            for t, x in zip(pieces, self.pieces, strict=True)
        ]
        return torch.cat(runs, d + 1).reshape(self.shape) if len(runs) > 1 else runs[0].reshape(self.shape)

    def local(self, pieces: Sequence[Tensor]) -> Tensor:
        """The rank's slice of the parameter, in the parameter's own dimensions, from its slices of the pieces."""
        d, repeat = self.layout.sharded_dim, self.repeat
        if d is None or (len(pieces) == 1 and pieces[0].ndim == len(self.shape)):
            return pieces[0]
        around = math.prod(self.shape[:d]) * math.prod(self.shape[d + 1 :]) * repeat
        runs = [t.reshape(*self.shape[:d], repeat, t.numel() // max(around, 1), *self.shape[d + 1 :]) for t in pieces]
        fused = torch.cat(runs, d + 1) if len(runs) > 1 else runs[0]
        return fused.reshape(*self.shape[:d], -1 if fused.numel() else 0, *self.shape[d + 1 :])

    def shard(self, full: Tensor, mesh: DeviceMesh, rank: int, device: torch.device) -> list[DTensor]:
        """This rank's DTensors of a whole parameter; only the rank's slice is moved to `device`.

        Args:
            full: the parameter. mesh: of the tp ranks. rank: this one's number among them. device: of the result.
        """
        if not self.pieces:
            local = full.detach().to(device, copy=True)
            return [DTensor.from_local(local, mesh, [Whole()], run_check=False)]
        out = []
        for whole, x in zip(self.cut(full.detach()), self.pieces, strict=True):
            start, length = chunk(x.shape[x.dim], rank, self.tp)
            local = whole.narrow(x.dim, start, length).to(device, copy=True).contiguous()
            size = torch.Size(x.shape)
            out.append(
                DTensor.from_local(local, mesh, [Split(x.dim)], run_check=False, shape=size, stride=strides(size))
            )
        return out

    def full(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole parameter on every rank (collective), from its DTensors."""
        wholes = []
        for p in pieces:
            wholes.append(p.full_tensor() if isinstance(p, DTensor) else p)
        return self.fuse(wholes)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    sizes = [max(s, 1) for s in shape]  # as torch: a dimension of size 0 counts as one of 1
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def laid_like(old: Tensor, whole: Tensor, device: torch.device) -> Tensor:
    """A whole piece, laid out as the one that is there (over further mesh dimensions too, once FSDP has them)."""
    if not isinstance(old, DTensor):
        return whole
    return distribute_tensor(whole.to(device), old.device_mesh, old.placements, src_data_rank=None)


class Unwrap(torch.autograd.Function):
    """All of a block's parameters to local tensors in one node; the gradients become DTensors again."""

    @staticmethod
    def forward(ctx, *parameters: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        locals_ = tuple([local_of(p).detach() for p in parameters])
        frozen = [t for t, needed_grad in zip(locals_, ctx.needs_input_grad, strict=True) if not needed_grad]
        ctx.mark_non_differentiable(*frozen)
        return locals_

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In the parameters' own strides, as autograd accumulates plain gradients: fused optimizers go by memory.
        wrap = as_dtensor if torch.is_grad_enabled() else like_dtensor
        out: list[Tensor | None] = []
        for g, p in zip(grads, ctx.parameters, strict=True):
            out.append(None if g is None else wrap(g.contiguous(), p))
        return tuple(out)


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """This rank's part as a DTensor that lies as `like` does; `compat.like_dtensor` where autograd need not see it."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def unwrap(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Local tensors of a block's parameters; plain tensors pass."""
    if not parameters or not isinstance(parameters[0], DTensor):
        return tuple(parameters)
    if torch.is_grad_enabled():
        return Unwrap.apply(*parameters)  # type: ignore[no-any-return]
    return tuple([_untracked(local_of(p)) for p in parameters])


def _untracked(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def wrap(local: Tensor, layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """This rank's part as a DTensor, differentiable.

    Args:
        local: the part.
        layout: I, P, R (only where no gradient flows), or S in DTensor's own (plain) partition.
        shape: of the whole value.
        mesh: the tp ranks.
    """
    return _Wrap.apply(local, placement(layout), torch.Size(shape), mesh)  # type: ignore[no-any-return]


def placement(layout: Layout) -> Placement:
    """DTensor's word for a layout."""
    if layout.sharded_dim is not None:
        return Split(layout.sharded_dim)
    return Summand(layout.reduction) if layout.partial else Whole()


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Placement, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
        # The gradient of a summand is whole on every rank; that of a slice is the slice.
        ctx.gradient = [placement if isinstance(placement, Split) else Whole()]
        local = local.detach().contiguous()
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=strides(shape))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.redistribute(placements=ctx.gradient).to_local(), None, None, None
