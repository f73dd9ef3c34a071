"""Names of stored tensors matched with the model's, and everything that does not fit, before anything is loaded."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.errors import StateError
from autotp.runtime import state
from autotp.runtime.interop.ownership import INSTEAD, of_another_rank
from autotp.runtime.shard_state import ShardState
from autotp.runtime.storage import Box

from .digests import Entry

Rename = Callable[[str], str]
Sources = dict[str, list[str]]  # pattern of transformers' mapping -> stored names


class Archive(Protocol):
    """Stored tensors by name. `shared`: other things than the model may be stored beside it."""

    shared: bool
    entries: dict[str, Entry]
    extra: dict[str, Any]

    @property
    def path(self) -> Path | str:
        """Its name in messages."""
        ...

    def read(self, name: str, boxes: Any) -> None:
        """Fill the boxes from the stored tensor `name`."""
        ...


class TensorArchive:
    """A full state dict in memory, of whole tensors or DTensors, or in a pickled file that the user trusts."""

    shared = False

    def __init__(self, tensors: Mapping[str, Any], file: Path | None = None) -> None:
        self.path: Path | str = file or "the state dict"
        if foreign := [n for n, t in tensors.items() if of_another_rank(t)]:
            raise StateError(f"{foreign[0]} is another rank's part: one rank had pickled it for all. {INSTEAD}")
        self.extra: dict[str, Any] = {}
        self.tensors = tensors
        self.entries = {n: _entry(t, Path(self.path)) for n, t in tensors.items()}

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the tensor `name`; collective where that is a DTensor."""
        value = self.tensors[name].detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        for box in boxes:
            box.tensor.copy_(value[box.slices])


def _entry(value: Any, file: Path) -> Entry:
    if not isinstance(value, Tensor):
        return Entry((), type(value).__name__, file)
    return Entry(tuple(value.shape), "on the meta device" if value.is_meta else value.dtype, file)


@dataclass(frozen=True)
class NameMatch:
    """Tensors of an archive by those of the model that they are.

    Attributes:
        stored: first name of each tensor of the model -> the names that it is stored under, more than one where tied.
        missing, unexpected: names as `load_state_dict` reports them.
    """

    stored: dict[str, list[str]]
    missing: list[str]
    unexpected: list[str]


def match(shards: ShardState, archive: Archive, strict: bool, cast: bool, renamed: bool) -> NameMatch:
    """Compare the names, shapes and types of an archive with the model's.

    Args:
        shards: of the module. archive: the checkpoint. strict: every name must be on both sides.
        cast: another floating-point dtype is no difference. renamed: the names may have other prefixes.

    Raises:
        StateError: tensors are missing, unknown, or of another shape or type; all of them are listed.
    """
    names = dict(state.named_tensors(shards))
    aliases = shards.aliases
    buffers = {
        n: aliases.get(n, n) for n, _ in shards.root.named_buffers(remove_duplicate=False)
    }  # those not persistent may come too
    rename, within = _naming(shards, names, archive) if renamed else (str, "")
    stored: dict[str, list[str]] = {}
    names_read = set()
    for name, first in (buffers | names).items():
        if rename(name) in archive.entries:
            names_read.add(rename(name))
            if rename(name) not in stored.setdefault(first, []):
                stored[first].append(rename(name))
    missing = [n for n, first in names.items() if first not in stored]
    ignored = [re.compile(p) for p in getattr(shards.bare, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names_read |= {rename(n) for n in shards.elsewhere}  # other stages of a pipeline look for those
    unexpected = [
        n
        for n in archive.entries
        if n not in names_read and n.startswith(within) and not any(p.search(n) for p in ignored)
    ]
    wrong = [text for first, keys in stored.items() for k in keys if (text := _odd(shards, first, k, archive, cast))]
    if wrong or (strict and (missing or unexpected)):
        raise StateError(_faults_text(archive, missing, unexpected, wrong, cast))
    return NameMatch(stored, missing, unexpected)


def _naming(shards: ShardState, names: Mapping[str, str], archive: Archive) -> tuple[Rename, str]:
    """Return how the model's names are stored, by which way finds most of them, and the prefix of what is the model's.

    A Hugging Face folder may hold the model without its head or a model's body for the headless class; a training
    script may have stored it under a key.
    """
    base = getattr(shards.bare, "base_model_prefix", "")
    longest = max(names, key=len, default="")
    outer = sorted({key[: -len(longest)] for key in archive.entries if longest and key.endswith("." + longest)})
    ways: list[tuple[Rename, str]] = [(lambda n: n, "")]
    for prefix in [f"{base}.", *outer]:
        ways.append(((lambda n, p=prefix: p + n), prefix if archive.shared else ""))
    ways += [((lambda n: n.removeprefix(base + ".")), "")] if isinstance(base, str) and base else []
    return max(ways, key=lambda way: len({first for n, first in names.items() if way[0](n) in archive.entries}))


def _odd(shards: ShardState, first: str, key: str, archive: Archive, cast: bool) -> str:
    entry, shape, tensor = archive.entries[key], shards.storage_of(first).shape, state.pieces(shards, first)[0]
    what = f"{entry.file.name}: {key} is"
    if isinstance(entry.dtype, str):
        return f"{what} {entry.dtype}: no tensor with values of a type that torch has"
    if entry.shape != shape:
        return f"{what} {list(entry.shape)}, the model has {list(shape)}"
    if entry.dtype != tensor.dtype and not cast:
        return f"{what} {_short(entry.dtype)}, the model has {_short(tensor.dtype)}"
    return ""


def _faults_text(archive: Archive, missing: list[str], unexpected: list[str], wrong: list[str], cast: bool) -> str:
    lines = [f"{archive.path} does not fit the model, and nothing was loaded."]
    lines += [f"  missing: {name}" for name in missing]
    lines += [f"  unknown: {archive.entries[name].file.name}: {name}" for name in unexpected]
    lines += [f"  {text}" for text in wrong]
    kinds = "" if cast else " Types are changed where cast=True says so."
    return "\n".join(lines) + f"\nstrict=False allows missing and unknown names.{kinds}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def converted(shards: ShardState, archive: Archive) -> Archive:
    """Return the archive in the names and forms of the running model, where transformers has a mapping for it."""
    bare: Any = shards.bare
    if archive.shared or not _mapped(bare):
        return archive
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(bare)
    if not mapping:
        return archive
    return Converted(bare, archive, mapping, {n for n, _ in state.named_tensors(shards)})


def reverted(bare: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the running model in the forms and under the names of its files."""
    if not _mapped(bare):
        return tensors
    loading = importlib.import_module("transformers.core_model_loading")
    back: dict[str, Tensor] = loading.revert_weight_conversion(bare, tensors)
    for n, t in back.items():  # a view of another tensor cannot be written as it is
        back[n] = t if t is tensors.get(n) else t.clone(memory_format=torch.contiguous_format)
    return back


def _mapped(bare: Any) -> bool:
    """Return whether this is a transformers model, and that library has what is needed here."""
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
        """Its name in messages."""
        return self.archive.path

    def _keep(self, key: str, name: str) -> None:
        self.entries[name], self.stored[name] = self.archive.entries[key], key

    def _add(self, name: str, converter: Any, sources: Sources) -> None:
        """Add the tensors that a mapping makes of these, by their shapes; where it cannot, they stay what they are."""
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
