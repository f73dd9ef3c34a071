"""The tensors that hold a parameter: DTensors that torch's own tools understand, and back to the original's shape.

`autotp.plans.pieces` says in numbers which pieces those are; this file alone knows the tensors. Every state dict has
the original's names. Outputs that are left sharded are DTensors too. `ShardState` is the record of all that one rank
holds.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as Summand
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement

from autotp.comm.conversions import function_for
from autotp.comm.ranks import PLAIN_PROCESS, Ranks
from autotp.comm.virtual import Host, Hosts
from autotp.compat import joined_mesh, like_dtensor, local_of, tree_map_only
from autotp.errors import StateError
from autotp.ir.layouts import I, Layout, Shard
from autotp.ir.program import MeshPlace
from autotp.ir.specs import INVARIANT
from autotp.plans.estimates import ALONE, Axes
from autotp.plans.pieces import Block, Piece, Pieces


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it starts in the whole, and the memory of this rank that it is a view of."""

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def block(self) -> Block:
        """The block in numbers."""
        return Block(self.offset, tuple(self.tensor.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index into the whole."""
        return self.block.slices((0,) * len(self.offset))

    def within(self, block: Block) -> Box | None:
        """Return the part of it within a block, counted from the block's start; None where they do not overlap."""
        common = self.block.common(block)
        if not common.elements:
            return None
        start = tuple(at - o for at, o in zip(common.offset, block.offset, strict=True))
        return Box(start, self.tensor[common.slices(self.offset)])


class Storage(Pieces):
    """The tensors that hold one parameter, and what is made of them."""

    def local(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the rank's slice of the parameter, in its own dimensions, from its slices of the pieces."""
        d, repeat = self.layout.sharded_dim, self._run[1]
        if d is None or self._plain:
            return pieces[0]
        if (memory := self._in_one(pieces, d)) is not None:
            return _Joined.apply(memory, d, *pieces) if torch.is_grad_enabled() else memory  # type: ignore[no-any-return]
        before, after = pieces[0].shape[:d], self.shape[d + 1 :]  # of owners each has a part of dimension 0
        around = math.prod(before) * math.prod(after) * repeat
        runs = [t.reshape(*before, repeat, t.numel() // max(around, 1), *after) for t in pieces]
        fused = torch.cat(runs, d + 1) if len(runs) > 1 else runs[0]
        return fused.reshape(*before, -1 if fused.numel() else 0, *after)

    def _in_one(self, pieces: Sequence[Tensor], d: int) -> Tensor | None:
        """Return the memory that pieces of unlike shares were made in, where they are still adjacent there.

        Args:
            pieces: the rank's slices of them. d: the sharded dimension.
        """
        parts = [t for t in pieces if t.numel()]
        if not (parts and self._adjoining) or torch.compiler.is_compiling() or {*map(type, parts)} != {Tensor}:
            return None
        first, at = parts[0], parts[0].storage_offset()
        for t in parts:
            same = t.untyped_storage()._cdata == first.untyped_storage()._cdata and t.stride() == first.stride()
            if not same or t.storage_offset() != at:
                return None
            at += t.shape[d] * t.stride(d)
        size, stride = [*first.shape], [*first.stride()]
        size[d] = sum(t.shape[d] for t in parts)
        del size[d + 1], stride[d + 1]
        return first.detach().as_strided(size, stride)

    @property
    def _adjoining(self) -> bool:
        """Return whether the pieces are of unlike shares, which are stored in one memory."""
        return self.owners == self._run[1] == 1 < len(self.pieces) and all(x.starts for x in self.pieces)

    def _memory(self, like: Tensor, shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
        """Return memory for this rank's slices of pieces; of unlike shares in one, so that reading them joins nothing.

        Args:
            like: of the type. shapes: of the slices. device: where they are.
        """
        d = self.layout.sharded_dim
        if d is None or not self._adjoining or max(shape[d + 1] for shape in shapes) > 1:  # in one plain process
            return [torch.empty(shape, dtype=like.dtype, device=device) for shape in shapes]
        lengths = [shape[d] * shape[d + 1] for shape in shapes]  # a rank has one of the second, or none
        whole = like.new_empty((sum(lengths), *shapes[0][:d], *shapes[0][d + 2 :]), device=device).movedim(0, d)
        out = []
        for part, shape in zip(whole.split(lengths, d), shapes, strict=True):
            out.append(part.unsqueeze(d + 1) if part.numel() else part.new_empty(shape))
        return out

    def mine(self, pieces: Sequence[Tensor], ranks: Ranks) -> Tensor:
        """Return the rank's slice of the parameter, differentiable.

        Args:
            pieces: the rank's slices of them. ranks: of tp.
        """
        if not self.held_whole or ranks.tp == 1:
            return self.local(pieces)
        whole, mine = INVARIANT, self.layout.to_runtime()
        return function_for(whole, mine)(pieces[0], whole, mine, rank=ranks.rank, tp=ranks.tp, group=ranks.group_name)

    def shard(self, full: Tensor, ranks: Ranks, device: torch.device) -> list[Tensor]:
        """Return this rank's DTensors of a whole parameter, in memory of their own; in one plain process whole pieces.

        Args:
            full: the parameter. ranks: of tp. device: of the result, to which the rank's slice alone is moved.
        """
        out = []
        parts = self.pieces if self.split or self.owners > 1 else ()
        shapes = [self.local_shape(x, ranks) for x in parts] or [(0,)]
        for x, local in zip(self.pieces, self._memory(full, shapes, device), strict=True):
            # What is whole keeps the original's strides, such as those of channels that come last.
            stride = strides(x.shape)
            if x.dim is None and self.owners == 1:
                local = torch.empty_like(full.detach(), device=device)
                stride = local.stride()
            if (mesh := ranks.mesh) is not None:
                cuts = [Whole() if x.dim is None else Split(x.dim)]
                if self.owners > 1:
                    mesh, cuts = joined_mesh(ranks.batch.mesh, mesh), [Split(0), *cuts]  # type: ignore[union-attr]
                shape = torch.Size(x.shape)
                local = DTensor.from_local(local, mesh, cuts, run_check=False, shape=shape, stride=stride)
            out.append(local)
        return self.write(out, full.detach())

    def local_shape(self, piece: Piece, ranks: Ranks) -> tuple[int, ...]:
        """Return the shape that a rank has of a piece; in one plain process the whole's."""
        if ranks.mesh is None:
            return piece.shape
        return self.share(piece, ranks.rank, ranks.batch.rank if ranks.batch is not None else 0).size

    def write(self, pieces: list[Tensor], value: Tensor) -> list[Tensor]:
        """Write a whole parameter to what the pieces hold of it, and return these."""
        for box in self.boxes(pieces):
            if box.tensor.numel():
                box.tensor.copy_(value[box.slices])
        return pieces

    def full(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter on every rank (collective), from its DTensors; tensors that are whole pass."""
        wholes = tree_map_only(DTensor, DTensor.full_tensor, pieces)
        if self._plain:
            return wholes[0]
        value = wholes[0].new_empty(self.shape)
        for box in self.boxes(wholes):
            value[box.slices] = box.tensor
        return value

    def laid(self, value: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return a whole tensor, or a DTensor of it (collective), as what the pieces hold of it, in their type."""
        if isinstance(value, DTensor):
            if len(pieces) == 1 and same_layout(pieces[0], value):
                return [value]
            value = value.full_tensor()
        return self.write([torch.empty_like(piece) for piece in pieces], value)

    def boxes(self, pieces: Sequence[Tensor]) -> list[Box]:
        """Return the blocks of the original parameter that `pieces`, this rank's pieces of it, are.

        Args:
            pieces: a DTensor for each piece; in one plain process the whole pieces. What is shaped like the pieces,
                such as an optimizer's moments, may take their place.

        Returns: boxes in the parameter's own dimensions, each a view of its piece's memory; empty ones are left out,
            but for a parameter without elements.
        """
        if math.prod(self.shape) == 0:
            return [Box((0,) * len(self.shape), pieces[0].new_empty(self.shape))]
        out = []
        for t, piece in zip(pieces, self.pieces, strict=True):
            block, local = _window(t, piece)
            if local.numel():
                blocks = [*self.unfolded(piece, block)]
                # view, not reshape: a copy would be filled in place of the parameter
                d = self.layout.sharded_dim or 0
                parts = local.unbind(d) if self._run[1] > 1 and not self._plain else [local]
                if piece.starts:
                    parts = [x for part in parts for x in part.unbind(d + 1)]
                out += [Box(b.offset, part.view(b.size)) for b, part in zip(blocks, parts, strict=True)]
        return out


def _window(t: Tensor, piece: Piece) -> tuple[Block, Tensor]:
    """Return which block of a piece this rank holds, and its memory.

    The axes of the mesh cut in order; where torch's data parallelism has spread it, that cuts what tp leaves.
    """
    block, local = Block.whole(piece.shape), t.detach()
    if isinstance(local, DTensor):
        mesh = local.device_mesh
        later = any(type(p) is not Split and hasattr(p, "dim") for p in local.placements)
        for axis in sorted(range(mesh.ndim), reverse=later):
            cut = getattr(local.placements[axis], "dim", None)
            if cut is not None:
                block = block.chunk(cut, mesh.get_local_rank(axis), mesh.size(axis))
        local = local.to_local()
    if tuple(local.shape) != block.size and (block.elements or local.numel()):
        raise StateError(
            f"a piece of shape {piece.shape}, split on dimension {piece.dim}, is held here as {tuple(local.shape)} "
            f"where {block.size} was expected: something other than autotp's own dp has spread it. Use "
            "full_state_dict() and load_state_dict() for this module."
        )
    return block, local


def memory_like(like: Tensor, device: torch.device) -> Tensor:
    """Return memory for what a fake tensor, or one on the meta device, stands for; a parameter for a parameter."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return nn.Parameter(empty, like.requires_grad) if isinstance(like, nn.Parameter) else empty


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides of a contiguous tensor of this shape."""
    return torch.empty(tuple(shape), device="meta").stride()


def same_layout(old: Tensor, new: DTensor) -> bool:
    """Return whether two tensors have the same shape, mesh and placements."""
    alike = isinstance(old, DTensor) and old.device_mesh == new.device_mesh and old.placements == new.placements
    return alike and old.shape == new.shape


class Unwrap(torch.autograd.Function):
    """Conversion of a block's parameters to local tensors in one node; the gradients become DTensors again."""

    @staticmethod
    def forward(ctx, owners: Sequence[int], *parameters: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.parameters, ctx.owners = parameters, owners
        ctx.set_materialize_grads(False)
        locals_ = tuple([local_of(p).detach() for p in parameters])
        frozen = [t for t, needed_grad in zip(locals_, ctx.needs_input_grad[1:], strict=True) if not needed_grad]
        ctx.mark_non_differentiable(*frozen)
        return locals_

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In the parameters' own strides, as autograd accumulates plain gradients: fused optimizers go by memory.
        wrap = as_dtensor if torch.is_grad_enabled() else like_dtensor
        out = []
        for g, p, n in zip(grads, ctx.parameters, ctx.owners, strict=True):
            # Where the ranks of dp have a part each nothing is summed over it: of the mean only its divisor is left.
            g = g / n if n > 1 and g is not None else g
            out.append(None if g is None else wrap(_laid_as(g, local_of(p)), p))
        return None, *out


def _laid_as(grad: Tensor, part: Tensor) -> Tensor:
    """Return a gradient in the strides of what it is of, which are not those of its shape in memory that is shared."""
    # A view of no elements is contiguous, and would keep the memory of the whole gradient.
    return grad.contiguous() if part.is_contiguous() and part.numel() else torch.empty_like(part).copy_(grad)


class _Joined(torch.autograd.Function):
    """Concatenation of pieces that are adjacent in one memory, which is returned; their gradients are its parts."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, dim: int, *pieces: Tensor) -> Tensor:
        ctx.dim, ctx.shapes = dim, [t.shape for t in pieces]
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d = ctx.dim
        parts = grad.split([shape[d] * shape[d + 1] for shape in ctx.shapes], d)
        return None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's part with the mesh and placements of `like`; without autograd `compat.like_dtensor` does it."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def unwrap(parameters: Sequence[Tensor], owners: Sequence[int]) -> tuple[Tensor, ...]:
    """Return local tensors of a block's parameters; plain tensors pass.

    Args:
        parameters: of the block. owners: of each, ranks of dp that have a part of it each.
    """
    if not parameters or not isinstance(parameters[0], DTensor):
        return tuple(parameters)
    if torch.is_grad_enabled():
        return Unwrap.apply(owners, *parameters)  # type: ignore[no-any-return]
    return tuple([_untracked(local_of(p)) for p in parameters])


def _untracked(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def wrap(local: Tensor, layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """Return this rank's part as a DTensor, differentiable.

    Args:
        local: the part.
        layout: I, P, R (only where no gradient flows), or S in DTensor's own (plain) partition.
        shape: of the whole value.
        mesh: the tp ranks.
    """
    return _Wrap.apply(local, placement(layout), torch.Size(shape), mesh)  # type: ignore[no-any-return]


def placement(layout: Layout) -> Placement:
    """Return DTensor's placement for a layout."""
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


# ---- the record of a rank --------------------------------------------------------------------------------------------


@dataclass(eq=False)  # a member of weak sets
class ShardState:
    """The tree of modules that holds a rank's tensors, and how those tensors are the original's.

    The tensors themselves are parameters and buffers of the modules in `parts`, so that torch's tools see them.
    "First name" below: of the names of a tied tensor, the first in the original's order.

    Attributes:
        bare: the original with fake tensors; it holds no weights.
        ranks: the tp ranks.
        tp: how many shards a parameter is cut into, also where there are no ranks.
        axis: the axes beside tp that its processes are on.
        aliases: every name of a parameter or buffer -> its first name.
        parts: the original's path of each of its modules -> the module that stands for it; "" is the sharded module.
        storages: first name of each parameter -> its whole shape, its layout, and the pieces that a rank's slice is.
        tables: likewise of each buffer that is split.
        holders: first name of each buffer -> all modules that hold it, and under which attribute.
        units: with dp: first name of a parameter -> path of the module in whose group it is gathered or summed.
        summing: whether gradients are summed over dp in this backward.
        elsewhere: names of the parameters and buffers that other stages of a pipeline hold alone.
        counter: of the module's calls, counts writes to the weights.
        staged: whether this is the part of one rank of a pipeline.
        hosts: of virtual ranks, those of this process on each axis; none where a rank is a process.
    """

    bare: nn.Module
    ranks: Ranks
    tp: int
    aliases: dict[str, str]
    axis: Axes = ALONE
    parts: dict[str, nn.Module] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    tables: dict[str, Storage] = field(default_factory=dict)
    holders: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    summing: bool = True
    elsewhere: frozenset[str] = frozenset()
    counter: Any = None
    staged: bool = False
    hosts: Hosts = ()

    @property
    def host(self) -> Host | None:
        """The virtual ranks of tp of this process; None where a rank is a process."""
        return self.hosts[-1] if self.hosts else None

    @property
    def by_torch(self) -> Axes:
        """The axes over which torch sums gradients."""
        return ALONE if self.hosts else self.axis

    def places(self) -> dict[str, MeshPlace]:
        """Return this rank's place on each mesh axis; rank 0's in one plain process, which does not run."""
        if self.hosts:
            return {host.axis: MeshPlace(host.first, host.size, host.group) for host in self.hosts}
        axes = {"dp": PLAIN_PROCESS, "cp": PLAIN_PROCESS, "tp": self.ranks, **self.ranks.beside}
        places = {name: MeshPlace(x.rank, x.tp, x.group_name) for name, x in axes.items()}
        return places | {"tp": places["tp"]._replace(size=self.tp)}

    def storage(self, shape: Sequence[int], layout: Layout, owners: int = 1) -> Storage:
        """Return how a tensor of this shape is held under a layout, of which so many ranks have a part each."""
        return Storage(tuple(shape), layout, self.tp, self.host.size if self.host is not None else 0, owners)

    @property
    def device(self) -> torch.device:
        """The device of the rank's tensors, now or to come: in one process they go where the user sends them."""
        if self.ranks.mesh is None and (first := next(self.pieces(), None)) and not first[1].is_meta:
            return first[1].device
        return self.ranks.device

    @property
    def planners(self) -> Ranks:
        """The ranks of all axes."""
        return self.ranks.planners

    @property
    def root(self) -> nn.Module:
        """The sharded module."""
        return self.parts[""]

    def storage_of(self, first: str) -> Storage:
        """Return how a parameter or buffer is held."""
        if (storage := self.storages.get(first) or self.tables.get(first)) is not None:
            return storage
        owner, _, leaf = first.rpartition(".")
        return self.storage(getattr(self.parts[owner], leaf).shape, I)

    def place_of(self, first: str) -> tuple[nn.Module, list[str]]:
        """Return the part that holds a parameter or buffer, and the names of its pieces there."""
        owner, _, leaf = first.rpartition(".")
        return self.parts[owner], self.storage_of(first).names(leaf)

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Iterate over the parameters that the parts have now: the original's name, and whether it is whole on every tp
        rank."""
        for name, storage in self.storages.items():
            part, leaves = self.place_of(name)
            for piece in map(part._parameters.get, leaves):
                if piece is not None:
                    yield name, piece, not isinstance(storage.layout, Shard)

    def taken_away(self) -> str:
        """Return the name of a parameter that a part does not have any more; "" where all are there."""
        present = Counter(name for name, *_ in self.pieces())
        return next((name for name, storage in self.storages.items() if present[name] < len(storage.pieces)), "")

    def show_own(self) -> None:
        """Give the modules the parameters that this rank keeps, in place of what torch gathered for a forward."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def loaded(self) -> None:
        """Note that weights were loaded, on all ranks alike: writes that differed before no longer count."""
        if self.counter is not None:
            self.counter.settle()

    def agree_on_writes(self, what: str) -> None:
        """Refuse weights that were written on some ranks only, before they are read. A collective call.

        Raises:
            RankError: with how often each rank has written them.
        """
        if self.counter is not None:
            self.counter.agree(what, {"writes to weights": self.counter.writes()})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """Copy modules and their tensors; the ranks and what is known of the original are shared."""
        parts, holders, units = copy.deepcopy((self.parts, self.holders, self.units), memo)
        return replace(self, parts=parts, holders=holders, units=units, counter=None)
