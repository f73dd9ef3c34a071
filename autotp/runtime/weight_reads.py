"""Parameters read off the tree for a program: each as this rank's local tensor, whatever stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotp.comm.conversions import on_hosts
from autotp.comm.ranks import Ranks
from autotp.comm.virtual import Host, Hosts, Virtual, aligned
from autotp.compat import local_of
from autotp.errors import StateError
from autotp.ir.layouts import dealt
from autotp.ir.scopes import block_of, is_region, module_of, scope_path
from autotp.ir.specs import INVARIANT, REPLICATED, ShardSpec
from autotp.runtime.lower.hosted import convert

from .revision import Revision
from .storage import Storage, unwrap

MADE = (
    "{name} is no parameter any more: a hook, pruning or a parametrization makes it before its layer's forward, and "
    "programs read weights before that. Put it into the original model, and compile that."
)
SHAPE, LOCAL, TRAINED = attrgetter("shape"), attrgetter("_local_tensor"), attrgetter("requires_grad")


@dataclass
class Read:
    """Parameter or buffer that a unit reads at the start of its forward.

    The unit comes from the places of all users, and is asked at every call of a module: it is worked out once.
    """

    node: fx.Node
    name: str
    storage: Storage | None  # None for a buffer or constant
    table: Storage | None = None  # of a buffer that is split

    @property
    def owner(self) -> str:
        """The module that has it."""
        return self.name.rpartition(".")[0]

    @cached_property
    def unit(self) -> str:
        """The module that reads it: the repeated block that alone uses it, otherwise the root."""
        block = block_of(self.name)
        outside = [u for u in self.node.users if block not in map(module_of, scope_path(u))]
        return block if self.node.users and not outside else ""

    @cached_property
    def scope(self) -> str:
        """The place where it is read: its unit, or the checkpointed region there that alone uses it."""
        regions = set()
        for path in map(scope_path, self.node.users):
            unit = next((i for i, p in enumerate(path) if module_of(p) == self.unit), -1)
            regions.add(path[unit + 1] if unit + 1 < len(path) else "")
        region = regions.pop() if len(regions) == 1 else ""
        return region if is_region(region) else self.unit


@dataclass(frozen=True)
class Place:
    """Place in the tree that holds a tensor of a parameter, and the shape of this rank's part of it.

    Attributes:
        module, leaf: what has it as an attribute.
        name: of the attribute, in the whole tree.
        local: shape of this rank's part.
        mesh: None in one plain process.
        owners: ranks of dp that have a part of it each.
    """

    module: nn.Module
    leaf: str
    name: str
    local: torch.Size
    mesh: DeviceMesh | None
    owners: int = 1

    def settle(self) -> Tensor:
        """Return the parameter, or a tensor in its place that is sharded alike.

        Raises:
            StateError: it is another tensor than that, or none.
        """
        tensor = self.module._parameters.get(self.leaf)
        if tensor is None:
            raise StateError(MADE.format(name=self.name))
        if _fits(tensor, self):
            return tensor
        placed = f" placed on the ranks as {tensor.placements}" if isinstance(tensor, DTensor) else ""
        raise StateError(
            f"the tensor in the place of {self.name} has the shape {tuple(tensor.shape)}{placed}, and is not sharded "
            f"as the parameter is, of which this rank holds {tuple(self.local)}. Give one that is, as one made of it "
            "by operators, or load whole values with load_state_dict."
        )


def places(storage: Storage, module: nn.Module, name: str, ranks: Ranks) -> list[Place]:
    """Return the places of one parameter of the original.

    Args:
        storage: how it is held. module: the part that holds it. name: whole, of the original.
        ranks: of tp.
    """
    owner, _, leaf = name.rpartition(".")
    out = []
    for n, piece in zip(storage.names(leaf), storage.pieces, strict=True):
        local = torch.Size(storage.local_shape(piece, ranks))
        out.append(Place(module, n, f"{owner}.{n}" if owner else n, local, ranks.mesh, storage.owners))
    return out


def reader(places: Sequence[Place]) -> Callable[[], Sequence[Tensor]]:
    """Return a function that reads these, unwrapped in one step."""
    names = [(place.module, place.leaf) for place in places]
    shapes = [place.local for place in places]
    owners = [place.owners for place in places]
    split = bool(places) and places[0].mesh is not None
    tensors: list[Any] = []
    revision = -1  # in which the tensors were these

    def read() -> Sequence[Tensor]:
        nonlocal tensors, revision
        if revision != Revision.number:
            tensors = [module._parameters.get(leaf) for module, leaf in names]
            revision = Revision.number
        try:
            local = list(map(LOCAL, tensors)) if split else tensors
            fit = list(map(SHAPE, local)) == shapes
        except AttributeError:  # no parameter, or no DTensor
            local, fit = [], False
        if not fit:
            return unwrap([place.settle() for place in places], owners)
        plain = split and not torch.is_grad_enabled() and not any(map(TRAINED, local))
        return local if plain else unwrap(tensors, owners)

    return read


@dataclass(frozen=True)
class Slices:
    """Parameter as the virtual ranks of a process have it: each its slice, laid out in memory as a rank's own.

    Attributes:
        storage: how it is held. hosts: the process.
    """

    storage: Storage
    hosts: Hosts

    def read(self, pieces: Sequence[Tensor]) -> Any:
        """Return one tensor where it is whole and the batch is not sharded, else a `Virtual`, differentiable.

        Args:
            pieces: what this process holds of it.
        """
        value = self._over_tp(pieces)
        for host in self.hosts[:-1]:  # the gradients of all micro-batches are summed along the tree
            value = convert(value, INVARIANT, REPLICATED, self.hosts, host.axis)
        return value

    def _over_tp(self, pieces: Sequence[Tensor]) -> Any:
        """Return the slices of the virtual ranks of tp."""
        storage, host = self.storage, self.hosts[-1]
        if not torch.is_grad_enabled():  # torch's matmul has another kernel for a parameter, which ranks do not hold
            pieces = [piece.detach() for piece in pieces]
        if storage.layout.sharded_dim is None:
            return pieces[0]
        spec: Any = storage.layout.to_runtime()
        whole = pieces[0] if storage.held_whole else storage.local(pieces)
        if not storage.held_whole:  # of what is here they have a part each
            place, hosts = host.first // host.local, host.size // host.local
            here = tuple((dealt(count, place, hosts)[1], unit) for count, unit in spec.segments)
            spec, host = ShardSpec(spec.dim, spec.repeat, here), Host(0, host.local, host.local)
        if host.local == host.size and spec.plain:  # torch joins their gradients in one step
            slices = [x.contiguous() for x in whole.split(spec.lengths(host.size), spec.dim)]
        else:
            slices = on_hosts([whole] * host.local, INVARIANT, spec, host)
        slices = list(map(aligned, slices))
        return Virtual(slices) if host.local > 1 else slices[0]


def _fits(tensor: Tensor, place: Place) -> bool:
    if place.mesh is None:
        return tensor.shape == place.local
    return isinstance(tensor, DTensor) and local_of(tensor).shape == place.local
