"""Files of transformers models whose tensors are merged, split or renamed while loading, by transformers' mapping."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.runtime import state
from autotp.runtime.shard_state import ShardState
from autotp.runtime.storage import Box

from .checked import Entry
from .matching import Archive

Sources = dict[str, list[str]]  # pattern of transformers' mapping -> stored names


def converted(shards: ShardState, archive: Archive) -> Archive:
    """The archive under the names and in the forms of the running model, where transformers has a mapping for it."""
    bare: Any = shards.bare
    if archive.shared or not _mapped(bare):
        return archive
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(bare)
    if not mapping:
        return archive
    return Converted(bare, archive, mapping, {n for n, _ in state.named_tensors(shards)})


def reverted(bare: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the running model in the forms and under the names of its files."""
    if not _mapped(bare):
        return tensors
    loading = importlib.import_module("transformers.core_model_loading")
    back: dict[str, Tensor] = loading.revert_weight_conversion(bare, tensors)
    for n, t in back.items():  # a view of another tensor cannot be written as it is
        back[n] = t if t is tensors.get(n) else t.clone(memory_format=torch.contiguous_format)
    return back


def _mapped(bare: Any) -> bool:
    """Whether this is a transformers model, and that library has what is needed here."""
    loading = sys.modules.get("transformers.core_model_loading")
    members = ("rename_source_key", "revert_weight_conversion", "WeightConverter", "WeightRenaming", "dot_natural_key")
    return hasattr(bare, "base_model_prefix") and all(hasattr(loading, name) for name in members)


class Converted:
    """An archive seen through a mapping. What the mapping computes is computed whole, one tensor at a time."""

    shared = False

    def __init__(self, bare: Any, archive: Archive, mapping: Sequence[Any], names: set[str]) -> None:
        self.bare, self.archive, self.extra = bare, archive, archive.extra
        self.entries: dict[str, Entry] = {}
        self.stored: dict[str, str] = {}  # name here -> as it is stored, where only the name changes
        self.groups: dict[str, tuple[str, Any, Sources]] = {}  # name here -> what it is computed of
        loading = importlib.import_module("transformers.core_model_loading")
        renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
        groups: dict[str, tuple[Any, Sources]] = {}
        for key in sorted(archive.entries, key=loading.dot_natural_key):
            name, pattern = (key, None) if key in names else loading.rename_source_key(key, renamings, converters)
            if pattern is None or isinstance(archive.entries[key].dtype, str):
                self._keep(key, name if pattern is None else key)
                continue
            converter = next(c for c in converters if pattern in c.source_patterns)
            groups.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(key)
        for name, (converter, sources) in groups.items():
            self._add(name, converter, sources)

    @property
    def path(self) -> Any:
        """What it is called in messages."""
        return self.archive.path

    def _keep(self, key: str, name: str) -> None:
        self.entries[name], self.stored[name] = self.archive.entries[key], key

    def _add(self, name: str, converter: Any, sources: Sources) -> None:
        """The tensors that a mapping makes of these, by their shapes; where it cannot, they stay what they are."""
        keys = [key for own in sources.values() for key in own]
        try:
            tensors = self._convert(name, converter, sources, self._empty)
        except Exception:  # then they are reported as missing and unknown
            for key in keys:
                self._keep(key, key)
            return
        for target, t in tensors.items():
            self.entries[target] = Entry(tuple(t.shape), t.dtype, self.archive.entries[keys[0]].file)
            self.groups[target] = name, converter, sources

    def _empty(self, key: str, device: str = "meta") -> Tensor:
        entry = self.archive.entries[key]
        assert isinstance(entry.dtype, torch.dtype)
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)

    def _full(self, key: str) -> Tensor:
        tensor = self._empty(key, "cpu")
        self.archive.read(key, [Box((0,) * tensor.ndim, tensor)])
        return tensor

    def _convert(
        self, name: str, converter: Any, sources: Sources, tensor: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        one = copy.deepcopy(converter)
        for pattern, keys in sources.items():
            for key in keys:
                one.add_tensor(name, key, pattern, tensor(key))
        tensors = one.convert(name, model=self.bare, config=self.bare.config)
        return tensors | {n: t[0] for n, t in tensors.items() if isinstance(t, list)}

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the tensor `name` of the running model."""
        if name in self.stored:
            self.archive.read(self.stored[name], boxes)
            return
        tensor = self._convert(*self.groups[name], self._full)[name]
        for box in boxes:
            box.tensor.copy_(tensor[box.slices])
