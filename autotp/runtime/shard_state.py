"""A rank's part of a sharded module: the one record that state dicts, checkpoints and data parallelism work on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autotp.comm.ranks import Ranks
from autotp.ir.layouts import I as INVARIANT
from autotp.ir.layouts import Shard
from autotp.plans.estimates import ALONE, Axis

from .storage import Storage


@dataclass
class ShardState:
    """The tree of modules that holds a rank's tensors, and how those tensors are the original's.

    The tensors themselves are parameters and buffers of the modules in `parts`, so that torch's tools see them.
    "First name" below: of the names of a tied tensor, the first in the original's order.

    Attributes:
        bare: the original with fake tensors; it holds no weights.
        ranks: the tp ranks; None in one plain process.
        tp: how many shards a parameter is cut into, also where there are no ranks.
        axis: the data-parallel axis.
        aliases: every name of a parameter or buffer -> its first name.
        parts: the original's path of each of its modules -> the module that stands for it; "" is the sharded module.
        storages: first name of each parameter -> its whole shape, its layout, and the pieces that a rank's slice is.
        tables: likewise of each buffer that is split.
        holders: first name of each buffer -> all modules that hold it, and under which attribute.
        units: with dp: first name of a parameter -> path of the module in whose group it is gathered or summed.
        summing: whether gradients are summed over dp in this backward.
        elsewhere: names in the original's state dict of what other stages of a pipeline hold.
        counter: of the module's calls, counts writes to the weights.
    """

    bare: nn.Module
    ranks: Ranks | None
    tp: int
    aliases: dict[str, str]
    axis: Axis = ALONE
    parts: dict[str, nn.Module] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    tables: dict[str, Storage] = field(default_factory=dict)
    holders: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    summing: bool = True
    elsewhere: frozenset[str] = frozenset()
    counter: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the rank's tensors."""
        return self.ranks.device if self.ranks is not None else torch.device("cpu")

    @property
    def place(self) -> torch.device:
        """The device of its parameters now, or to come: in one process they go where the user sends them."""
        if self.ranks is not None:
            return self.ranks.device
        kind = next((piece.device for piece, _ in self.pieces()), torch.device("cpu"))
        if kind.type != "meta":
            return kind
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def root(self) -> nn.Module:
        """The sharded module."""
        return self.parts[""]

    def storage_of(self, first: str) -> Storage:
        """Return how a parameter or buffer is held."""
        if (storage := self.storages.get(first) or self.tables.get(first)) is not None:
            return storage
        owner, _, leaf = first.rpartition(".")
        return Storage(tuple(getattr(self.parts[owner], leaf).shape), INVARIANT, self.tp)

    def pieces(self) -> Iterator[tuple[nn.Parameter, bool]]:
        """Iterate over the parameters that the parts have now, and whether each is whole on every tp rank."""
        for name, storage in self.storages.items():
            owner, _, leaf = name.rpartition(".")
            for n in storage.names(leaf):
                piece = self.parts[owner]._parameters.get(n)
                if piece is not None:
                    yield piece, not isinstance(storage.layout, Shard)

    def taken_away(self) -> str:
        """Return the name of a parameter that a part does not have any more; "" where all are there."""
        for name, storage in self.storages.items():
            owner, _, leaf = name.rpartition(".")
            if any(self.parts[owner]._parameters.get(n) is None for n in storage.names(leaf)):
                return name
        return ""

    def loaded(self) -> None:
        """Note that weights were loaded, on all ranks alike: that ends what was written apart."""
        if self.counter is not None:
            self.counter.settle()

    def agree_on_writes(self, what: str) -> None:
        """Refuse weights that were written on some ranks only, before they are read. A collective call.

        Raises:
            RankError: with how often each rank has written them.
        """
        if self.counter is not None:
            self.counter.agree(what, {"writes to weights": str(self.counter.writes())})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """Modules and their tensors are copied; the ranks and what is known of the original are shared."""
        parts, holders, units = copy.deepcopy((self.parts, self.holders, self.units), memo)
        return replace(self, parts=parts, holders=holders, units=units, counter=None)
