"""Writes to a sharded module's tensors by way of their `.data`, which torch's count of versions leaves out.

A tensor gives one alias as its `.data` for as long as that is good, and the alias counts what is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autotp import compat


@dataclass
class DataWrites:
    """To one rank's part of a tensor, past its own count.

    Attributes:
        alias: what the tensor gives as its `.data`. count: of writes by earlier ones, and of assignments.
    """

    alias: Any = None
    count: int = 0

    @property
    def number(self) -> int:
        return self.count + (self.alias._version if self.alias is not None else 0)


@dataclass
class _Tables:
    """Tables of this process, by the parts of tensors: to the tensors themselves a weak reference would keep torch from
    swapping them. `revision` rises with every entry."""

    entries: Any = field(default_factory=WeakTensorKeyDictionary)
    revision: int = 0


tables = _Tables()


def _entry(part: Tensor) -> DataWrites:
    entry = tables.entries.get(part)
    if entry is None:
        entry = tables.entries[part] = DataWrites()
        tables.revision += 1
    return entry


def alias_of(tensor: Any, make: Callable[[Any], Any]) -> Any:
    """The `.data` of a tensor; `make` is torch's own getter."""
    entry = _entry(compat.part_of(tensor))
    if entry.alias is None or entry.alias.requires_grad:
        alias = make(tensor)
        if alias.is_inference():  # counts nothing
            return alias
        entry.count, entry.alias = entry.number, alias
    return entry.alias


def assigned(tensor: Tensor, before: Tensor) -> None:
    """Count an assignment to the `.data` of a tensor, and what its part `before` that had counted."""
    count = 0 if before.is_inference() else before._version
    entry = _entry(compat.part_of(tensor))
    entry.count += 1 + count + (_entry(before).number if before is not compat.part_of(tensor) else 0)


def entries_of(parts: Iterable[Tensor]) -> list[DataWrites]:
    """Return the entries of those that have any."""
    table = tables.entries
    if not len(table):  # as nearly always: of no part is asked then
        return []
    return [table[t] for t in parts if t in table]
